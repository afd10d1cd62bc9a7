"""Against SGLang 0.5.23's loader of w4afp8."""

from __future__ import annotations

import pytest
import torch

from moequant.dialects import find_dialect, get_dialect
from moequant.errors import UnsupportedError
from moequant.formats import dequantize, quantize

W4AFP8 = get_dialect("w4afp8")
BLOCK = "model.layers.1.mlp.experts"
EXPERT = f"{BLOCK}.0.up_proj"
ATTENTION = "model.layers.1.self_attn.o_proj"
NAMES = {"gate_proj": ("w13_", 0), "up_proj": ("w13_", 1), "down_proj": ("w2_", 0)}
"""make_expert_params_mapping of srt/layers/moe/fused_moe_triton/layer.py, and the half of w13."""


def weight(shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_sglang_s_parameters_hold_our_experts():
    """create_weights and process_weights_after_loading of srt/layers/quantization/w4afp8.py."""
    H, I = 512, 256
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    parameters = {
        "w13_weight": torch.empty(2 * I, H // 2, dtype=torch.int8),
        "w2_weight": torch.empty(H, I // 2, dtype=torch.int8),
        "w13_weight_scale_inv": torch.zeros(2 * I, H // 128),
        "w2_weight_scale_inv": torch.zeros(H, I // 128),
    }
    wanted = {}
    for i, (leaf, shape) in enumerate(shapes.items()):
        q = quantize(weight(shape, seed=i), "w4a8")
        wanted[leaf] = dequantize(q)
        group, half = NAMES[leaf]
        for name, loaded in W4AFP8.to_disk(f"{BLOCK}.0.{leaf}", q).items():
            parameter = name.replace(f"experts.0.{leaf}.", f"experts.{group}")
            place = parameters[parameter.removeprefix(f"{BLOCK}.")]
            rows = place.narrow(0, half * shape[0], shape[0])
            assert rows.shape == loaded.shape
            rows.copy_(loaded)
    for leaf, (group, half) in NAMES.items():
        N = shapes[leaf][0]
        codes = parameters[f"{group}weight"].narrow(0, half * N, N)
        scale = parameters[f"{group}weight_scale_inv"].narrow(0, half * N, N)
        # The kernel takes the even column from the low nibble; both are two's complement.
        low, high = codes << 4 >> 4, codes >> 4
        values = torch.stack([low, high], dim=-1).flatten(-2).float()
        # The loader rounds scales to BF16.
        found = values * scale.bfloat16().float().repeat_interleave(128, dim=-1)
        assert torch.equal(found, wanted[leaf])


def test_sglang_s_own_repacking_of_compressed_tensors_gives_our_bytes():
    """_unpack_repack_int32_to_cutlass_int8 of compressed_tensors_w4a8_fp8_moe.py, by its steps."""
    q = quantize(weight((128, 256)), "w4a8")
    words = get_dialect("compressed-tensors").to_disk(EXPERT, q)[f"{EXPERT}.weight_packed"]
    nibbles = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(-2)
    signed = (nibbles - 8).to(torch.int8)
    repacked = (signed[:, 1::2] << 4) | (signed[:, 0::2] & 15)
    assert torch.equal(repacked, W4AFP8.to_disk(EXPERT, q)[f"{EXPERT}.weight"])


def test_linear_layers_are_as_in_the_dialect_fp8():
    q = quantize(weight((256, 384)), "fp8_block")
    ours = W4AFP8.to_disk(ATTENTION, q)
    theirs = get_dialect("fp8").to_disk(ATTENTION, q)
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[n].view(torch.uint8), t.view(torch.uint8)) for n, t in theirs.items()
    )
    assert W4AFP8.from_disk(ATTENTION, "fp8_block", ours).scale.equal(q.scale)


def test_scales_of_other_writers_are_rounded_as_sglang_rounds_them():
    q = quantize(weight((128, 256)), "w4a8")
    tensors = W4AFP8.to_disk(EXPERT, q)
    name = f"{EXPERT}.weight_scale_inv"
    tensors[name] = tensors[name] * (1 + 2**-11)
    found = W4AFP8.from_disk(EXPERT, "w4a8", tensors)
    assert torch.equal(found.scale, tensors[name].bfloat16())


@pytest.mark.parametrize(("module", "format"), [(EXPERT, "fp8_block"), (ATTENTION, "w4a8")])
def test_experts_and_other_layers_have_one_format_each(module, format):
    with pytest.raises(UnsupportedError, match=rf"{module}: .* it must be .*, not {format}: "):
        W4AFP8.check(module, format, (128, 128))


def test_the_config_has_what_sglang_reads_and_what_others_need():
    config = W4AFP8.quantization_config({EXPERT: "w4a8", ATTENTION: "fp8_block"}, ["lm_head"])
    assert config == {
        "quant_method": "w4afp8",
        "group_size": 128,
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    read = find_dialect(config).reader(config)
    assert (read(EXPERT), read(ATTENTION), read("lm_head")) == ("w4a8", "fp8_block", None)
