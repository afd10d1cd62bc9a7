"""Names that are meant where another is given."""

from __future__ import annotations

import pytest

from moequant.errors import nearest_names

NAMES = ["fp8_block", "nvfp4", "mxfp4", "mxfp8", "sm90", "sm100", "h100", "b200", "vllm", "triton"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("nvpf4", "nvfp4"),
        ("NVFP4 ", "nvfp4"),
        ("fp8-block", "fp8_block"),
        ("vlm", "vllm"),
        ("tirton", "triton"),
    ],
)
def test_a_misspelt_name_is_recognised(given, meant):
    assert nearest_names(given, NAMES) == [meant]


def test_names_of_which_the_end_was_left_out_are_meant():
    assert nearest_names("mxfp", NAMES) == ["mxfp4", "mxfp8"]
    assert nearest_names("sm", NAMES) == ["sm90", "sm100"]
    assert nearest_names("gptoss", ["gpt-oss-20b", "gpt-oss-120b"]) == [
        "gpt-oss-20b",
        "gpt-oss-120b",
    ]


@pytest.mark.parametrize(
    "given", ["sm120", "sm89", "sm10", "h200", "b20", "b100", "mxfp6", "int8", "x", ""]
)
def test_another_thing_is_not_taken_for_a_misspelling(given):
    """Such as a GPU of another kind, which runs no code for the one that is spelt alike."""
    assert nearest_names(given, NAMES) == []
