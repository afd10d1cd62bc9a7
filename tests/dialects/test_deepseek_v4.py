"""Against the loaders of DeepSeek-V4 in vLLM 0.33.0 and SGLang 0.5.23."""

from __future__ import annotations

import pytest
import torch

from moequant.dialects import find_dialect, get_dialect
from moequant.errors import UnsupportedError
from moequant.formats import dequantize, quantize

V4 = get_dialect("deepseek-v4")
EXPERT = "layers.1.ffn.experts.0.w1"
SHARED = "layers.1.ffn.shared_experts.w2"
ATTENTION = "layers.1.attn.wq_b"
KEPT = ["embed", "head", "layers.1.ffn.gate", "layers.1.attn.compressor.wkv"]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def weight(shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_vllm_s_parameters_hold_our_mxfp4_experts():
    """load_weights of models/deepseek_v4/nvidia/model.py; create_weights of mxfp4.py."""
    q = quantize(weight((128, 256)), "mxfp4")
    stored = V4.to_disk(EXPERT, q)
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    codes.copy_(stored[f"{EXPERT}.weight"].view(torch.uint8))
    scale = torch.zeros(128, 8, dtype=torch.uint8)
    loaded = stored[f"{EXPERT}.scale"]
    assert loaded.dtype == torch.float8_e8m0fnu, "only these are taken as bytes"
    scale.copy_(loaded.view(torch.uint8))
    values = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
    found = values * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=-1)
    assert torch.equal(found, dequantize(q))


@pytest.mark.parametrize("module", [SHARED, ATTENTION])
@pytest.mark.parametrize("parameter", [torch.float8_e8m0fnu, torch.float32])
def test_scales_of_linear_layers_are_copied_by_value_whatever_the_parameter(module, parameter):
    """`is_scale_e8m0` of vLLM's quant_config.py is false beside FP8 experts."""
    q = quantize(weight((256, 256)), "fp8_block")
    stored = V4.to_disk(module, q)[f"{module}.scale"]
    assert stored.dtype == torch.float8_e8m0fnu
    assert torch.equal(torch.empty(2, 2, dtype=parameter).copy_(stored).float(), q.scale)


def test_scales_of_fp8_experts_are_float32():
    """vLLM's load_weights takes E8M0 scales of experts as bytes, also into FP32 parameters."""
    q = quantize(weight((256, 256)), "fp8_block", scale="float32")
    stored = V4.to_disk(EXPERT, q)
    assert stored[f"{EXPERT}.scale"].dtype == torch.float32
    assert torch.equal(V4.from_disk(EXPERT, "fp8_block", stored).scale, q.scale)
    with pytest.raises(UnsupportedError, match=rf"{ATTENTION}: the scale .* is no power of two"):
        V4.to_disk(ATTENTION, q)


@pytest.mark.parametrize(("format", "name"), [("mxfp4", "fp4"), ("fp8_block", "fp8")])
def test_the_config_is_the_release_s_and_says_the_experts_format(format, name):
    config = V4.quantization_config({EXPERT: format, ATTENTION: "fp8_block"}, KEPT)
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "expert_dtype": name,
        "modules_to_not_convert": [*sorted(KEPT), "lm_head"],
    }
    # SGLang's model_config.py: with it, topk_group stays what the config inherited.
    assert "routed_experts_quant_method" not in config
    assert find_dialect(config, [f"{EXPERT}.scale"]) is V4
    read = V4.reader(config)
    assert [read(m) for m in (EXPERT, ATTENTION, *KEPT)] == [format, "fp8_block"] + 4 * [None]


def test_mxfp4_outside_of_experts_is_refused():
    with pytest.raises(UnsupportedError, match=rf"{ATTENTION}: .*mxfp4 only for routed experts"):
        V4.check(ATTENTION, "mxfp4", (128, 128))


def test_experts_in_two_formats_are_refused_with_what_to_do():
    mtp = "mtp.0.ffn.experts.0.w1"
    with pytest.raises(UnsupportedError, match=rf"{EXPERT} in mxfp4 and {mtp} in fp8_block.*bf16"):
        V4.quantization_config({EXPERT: "mxfp4", mtp: "fp8_block"}, [])
