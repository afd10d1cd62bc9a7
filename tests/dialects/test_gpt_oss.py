"""The dialect of gpt-oss's releases: their bytes, by hand, and their config.json."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moequant.dialects import find_dialect, get_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize, quantize

MODULE = "model.layers.3.mlp.experts.7.down_proj"
# openai/gpt-oss-20b, config.json
RELEASED = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def test_codes_and_scales_lie_as_by_hand():
    # Columns 0, 1, 2 are 0.5, -6 and 1 times 2**3, all else is 0: codes 1, 15 and 2.
    w = torch.zeros(2, 64)
    w[1, 32:35] = torch.tensor([4.0, -48.0, 8.0])
    tensors = get_dialect("gpt-oss").to_disk(MODULE, quantize(w, "mxfp4"))
    blocks, scales = tensors[f"{MODULE}.blocks"], tensors[f"{MODULE}.scales"]
    assert (blocks.shape, scales.shape) == ((2, 2, 16), (2, 2))
    assert blocks.dtype == scales.dtype == torch.uint8
    assert blocks[1, 1].tolist() == [0xF1, 0x02] + [0] * 14
    assert scales[1, 1] == 127 + 3
    assert not blocks[0].any()
    assert not blocks[1, 0].any()


def test_transformers_decodes_the_same_weight():
    q = quantize(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), "mxfp4")
    tensors = get_dialect("gpt-oss").to_disk(MODULE, q)
    blocks, scales = (tensors[f"{MODULE}.{part}"][None] for part in ("blocks", "scales"))
    # It gives [E, K, N], as its modules hold a weight.
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    assert torch.equal(decoded, dequantize(q))


def test_the_released_config_is_read():
    dialect = find_dialect(RELEASED)
    assert dialect.name == "gpt-oss"
    format_of = dialect.reader(RELEASED)
    assert format_of(MODULE) == "mxfp4"
    for kept in ("lm_head", "model.layers.3.mlp.router", "model.layers.3.self_attn.q_proj"):
        assert format_of(kept) is None


def test_only_routed_experts_have_a_place():
    with pytest.raises(UnsupportedError, match=r"q_proj: the dialect gpt-oss supports only routed"):
        get_dialect("gpt-oss").check("model.layers.0.self_attn.q_proj", "mxfp4", (64, 64))


def test_blocks_of_another_size_are_named():
    tensors = get_dialect("gpt-oss").to_disk(MODULE, quantize(torch.ones(2, 64), "mxfp4"))
    tensors[f"{MODULE}.blocks"] = tensors[f"{MODULE}.blocks"].reshape(2, 4, 8)
    with pytest.raises(CheckpointError, match=r"blocks: shape \[2, 4, 8\], not \[2, 4, 16\]"):
        get_dialect("gpt-oss").from_disk(MODULE, "mxfp4", tensors)
