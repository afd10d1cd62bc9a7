"""Experts that are kept stacked, as Qwen3.5's of multi-token prediction, are listed as kept.

By the rules of who reads the list: transformers' own function, compressed-tensors' own, and those
of vLLM 0.33 (`is_layer_skipped` of quant_utils.py, `get_moe_method` of compressed_tensors), in
words of this file.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from compressed_tensors.utils.match import match_name
from safetensors.torch import save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from moequant.conversion import convert
from moequant.dialects import find_dialect
from moequant.verification import verify

BLOCK = "mtp.layers.0.mlp.experts"
CONVERTED = "model.layers.0.mlp.experts"
KEPT_LINEAR = "mtp.layers.0.mlp.shared_expert.gate_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Qwen3.5's language model as its BF16 release lies, with multi-token prediction."""
    path = tmp_path_factory.mktemp("qwen3_5")
    experts, hidden, intermediate = 2, 128, 128
    config = {
        "model_type": "qwen3_5_moe_text",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
    }
    shapes = {"model.embed_tokens.weight": (16, hidden), f"{KEPT_LINEAR}.weight": (128, hidden)}
    for block in (BLOCK, CONVERTED):
        shapes[f"{block}.gate_up_proj"] = (experts, 2 * intermediate, hidden)
        shapes[f"{block}.down_proj"] = (experts, hidden, intermediate)
    shapes["model.layers.0.mlp.gate.weight"] = (experts, hidden)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def listed(source, tmp_path_factory):
    """listed(format): the quantization_config of the converted checkpoint."""

    def make(format):
        out = tmp_path_factory.mktemp(format) / "out"
        convert(source, out, format=format)
        assert verify(out, against=source, layers=0).ok
        return json.loads((out / "config.json").read_text())["quantization_config"]

    return make


def skipped_by_vllm(block, names):
    """A block of experts is skipped if its name lies within that of one that is listed."""
    return any(block in name for name in names if "experts" in name)


def ignored_by_vllm(module, names):
    """A name as it is, or a regular expression that matches from the start."""
    return any(
        re.match(name[3:], module) if name.startswith("re:") else name == module for name in names
    )


def test_fp8_lists_it_as_transformers_and_vllm_look_for_it(listed):
    names = listed("fp8_block")["modules_to_not_convert"]
    assert BLOCK in names
    assert not should_convert_module(BLOCK, names)
    assert not should_convert_module(KEPT_LINEAR, names)
    assert should_convert_module(CONVERTED, names)
    assert skipped_by_vllm(BLOCK, names)
    assert not skipped_by_vllm(CONVERTED, names)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "w4a8"])
def test_compressed_tensors_ignores_it_as_the_library_and_vllm_look_for_it(listed, format):
    names = listed(format)["ignore"]
    for projection in ("gate_proj", "up_proj", "down_proj"):
        kept, converted = f"{BLOCK}.0.{projection}", f"{CONVERTED}.0.{projection}"
        assert any(match_name(kept, name) for name in names)
        assert not any(match_name(converted, name) for name in names)
        assert ignored_by_vllm(kept, names)
        assert not ignored_by_vllm(converted, names)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
def test_our_own_reader_finds_it_kept(listed, format):
    config = listed(format)
    format_of = find_dialect(config).reader(config)
    assert format_of(f"{BLOCK}.1.up_proj") is None
    assert format_of(f"{CONVERTED}.1.up_proj") == format
