"""Sizes by role and format: of `inspect` and the model card, and of the report: they agree."""

from __future__ import annotations

import pytest

from moequant.conversion import convert
from moequant.storage.checkpoint import Checkpoint
from moequant.weights.sizes import roles_in, roles_of, size_by_role
from moequant.weights.source_model import read_source, seen_as_source, source_config


def sizes(path):
    """`size_by_role` by both readers."""
    checkpoint = Checkpoint.open(path)
    found = read_source(checkpoint.tensors, source_config(checkpoint))
    of_parts = roles_of(
        checkpoint.tensors.values(), found.model.architecture, seen_as_source(checkpoint)
    )
    return size_by_role(of_parts), size_by_role(roles_in(checkpoint.tensors, found))


@pytest.mark.parametrize(
    ("model_type", "format", "settings"),
    [
        ("qwen3_moe", "fp8_tensor", {"activation_scales": 0.01}),
        ("qwen3_moe", "nvfp4", {"activation_scales": 0.01}),
        ("qwen3_moe", "nvfp4", {"activation_scales": 0.01, "dialect": "modelopt"}),
        ("qwen3_moe", "w4a8", {}),
        ("gpt_oss", "mxfp4", {}),
        ("qwen3_moe", None, {}),
    ],
)
def test_both_readers_count_the_same(make_checkpoint, tmp_path, model_type, format, settings):
    path = make_checkpoint(model_type=model_type)
    if format is not None:
        path = convert(path, tmp_path / "out", format=format, **settings).output
    one, other = sizes(path)
    assert one == other
    (experts,) = [group for group in one if group["role"] == "routed_experts"]
    assert experts["format"] == format
