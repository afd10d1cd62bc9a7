from __future__ import annotations

import pytest
import torch

from moequant.conversion import Recipe
from moequant.formats import CONVERTIBLE, REGISTRY, WRITABLE, format_name, quantize, unknown_format


@pytest.mark.parametrize("name", WRITABLE)
def test_case_and_separators_do_not_count(name):
    for text in (name, name.upper(), name.replace("_", "-"), name.replace("_", "")):
        assert format_name(text, WRITABLE) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp8", "fp8_block"),
        ("FP8", "fp8_block"),
        ("FP8_DYNAMIC", "fp8_channel"),
        ("NVFP4A16", "nvfp4"),
        ("W4AFP8", "w4a8"),
        ("bfloat16", "bf16"),
    ],
)
def test_names_of_others_for_the_same_numbers_are_accepted(text, name):
    assert format_name(text, WRITABLE) == name


def test_a_name_of_another_format_is_never_taken_for_one():
    """int4 has activations in 16 bits and w4a8 in FP8, so one is not an alias of the other."""
    for text in ("int4", "fp4", "awq", "int8", "fp16", "nvfp", ""):
        assert format_name(text, CONVERTIBLE) == text


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("int4", "w4a8"),
        ("AWQ", "w4a8"),
        ("FP4", "nvfp4 or mxfp4"),
        ("nvpf4", "nvfp4"),
        ("fp8_blok", "fp8_block"),
        ("mxfp", "mxfp4 or mxfp8"),
        ("NV", "nvfp4"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(text, nearest):
    message = unknown_format(text, CONVERTIBLE)
    assert message.startswith(f"unknown format '{text}'; use one of: fp8_block, ")
    assert message.endswith(f". Did you mean {nearest}?")


def test_a_name_like_none_is_answered_with_all_only():
    assert unknown_format("xyz", CONVERTIBLE).endswith(", ".join(CONVERTIBLE))


def test_recipes_and_functions_take_these_names_and_record_the_formats_own():
    assert Recipe.for_format("NVFP4").rules[0].format == "nvfp4"
    recipe = Recipe(rules=[{"roles": ["attention"], "format": "FP8"}])
    assert recipe.rules[0].format == "fp8_block"
    assert quantize(torch.ones(128, 128), "FP8").format == "fp8_block"
    assert set(map(str.lower, REGISTRY)) == set(REGISTRY)
