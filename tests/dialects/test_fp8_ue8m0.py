"""Against loaders of SGLang 0.5.23 and transformers 5.24, and releases that say E8M0 or MXFP4."""

from __future__ import annotations

import pytest
import torch

from moequant.dialects import REGISTRY, find_dialect, get_dialect
from moequant.errors import UnsupportedError
from moequant.formats import dequantize, quantize

UE8M0 = get_dialect("fp8-ue8m0")
BLOCK = "model.layers.1.mlp.experts"
EXPERT = f"{BLOCK}.0.up_proj"
ATTENTION = "model.layers.1.self_attn.o_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
DEEPSEEK_V31 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def weight(shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def written(experts, hidden, intermediate, format):
    """A layer of experts on disk, and what each weight of it decodes to."""
    shapes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    shapes["down_proj"] = (hidden, intermediate)
    tensors, wanted = {}, {}
    for e in range(experts):
        for i, (leaf, shape) in enumerate(shapes.items()):
            q = quantize(weight(shape, seed=3 * e + i), format)
            tensors |= UE8M0.to_disk(f"{BLOCK}.{e}.{leaf}", q)
            wanted[e, leaf] = dequantize(q)
    return tensors, wanted


# sglang 0.5.23, srt/layers/moe/fused_moe_triton/layer.py: make_expert_params_mapping.
SHARDS = {"gate_proj": ("w13_", 0), "up_proj": ("w13_", 1), "down_proj": ("w2_", 0)}


def fill_as_sglang(tensors, parameters, experts, intermediate):
    """load_weights of srt/models/qwen3_moe.py, and _load_w13 and _load_w2 on one rank."""
    for name, loaded in tensors.items():
        for e in range(experts):
            for leaf, (group, half) in SHARDS.items():
                if f"experts.{e}.{leaf}." not in name:
                    continue
                # The replacement leaves `experts.w13_weight`, and a name that no parameter has
                # would be passed over.
                parameter = name.replace(f"experts.{e}.{leaf}.", f"experts.{group}")
                rows = parameters[parameter.removeprefix(f"{BLOCK}.")][e]
                if group == "w13_":
                    size = rows.shape[0] // 2
                    rows = rows.narrow(0, half * size, size)
                assert rows.shape == loaded.shape
                rows.copy_(loaded)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_sglang_s_parameters_of_mxfp4_experts_hold_our_weights(scale_dtype):
    """As create_weights of mxfp4_marlin_moe.py (E8M0) and mxfp4_flashinfer_trtllm_moe.py (FP32)."""
    E, H, I = 2, 256, 128
    tensors, wanted = written(E, H, I, "mxfp4")
    parameters = {
        "w13_weight": torch.empty(E, 2 * I, H // 2, dtype=torch.int8),
        "w2_weight": torch.empty(E, H, I // 2, dtype=torch.int8),
        "w13_weight_scale_inv": torch.ones(E, 2 * I, H // 32).to(scale_dtype),
        "w2_weight_scale_inv": torch.ones(E, H, I // 32).to(scale_dtype),
    }
    fill_as_sglang(tensors, parameters, E, I)
    for e in range(E):
        for leaf, (group, half) in SHARDS.items():
            codes, scale = (parameters[f"{group}{n}"][e] for n in ("weight", "weight_scale_inv"))
            if group == "w13_":
                codes, scale = codes[half * I :][:I], scale[half * I :][:I]
            byte = codes.view(torch.uint8).long()
            # The even column is in the low nibble.
            values = torch.stack([E2M1[byte & 15], E2M1[byte >> 4]], dim=-1).flatten(-2)
            found = values * scale.float().repeat_interleave(32, dim=-1)
            assert torch.equal(found, wanted[e, leaf])


def test_sglang_s_and_vllm_s_parameters_of_fp8_experts_hold_our_weights():
    """FP32 scales, as create_fp8_moe_weight_ of SGLang's fp8.py and Fp8MoEMethod of vLLM's."""
    E, H, I = 2, 256, 128
    tensors, wanted = written(E, H, I, "fp8_block")
    assert {t.dtype for n, t in tensors.items() if "scale" in n} == {torch.float8_e8m0fnu}
    parameters = {
        "w13_weight": torch.empty(E, 2 * I, H, dtype=torch.float8_e4m3fn),
        "w2_weight": torch.empty(E, H, I, dtype=torch.float8_e4m3fn),
        "w13_weight_scale_inv": torch.ones(E, 2 * I // 128, H // 128),
        "w2_weight_scale_inv": torch.ones(E, H // 128, I // 128),
    }
    fill_as_sglang(tensors, parameters, E, I)
    for e in range(E):
        codes, scale = (parameters[f"w2_{n}"][e] for n in ("weight", "weight_scale_inv"))
        blocks = scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        assert torch.equal(codes.float() * blocks, wanted[e, "down_proj"])


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
def test_transformers_dequantizes_to_the_same_numbers(format):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    q = quantize(weight((256, 384)), format)
    codes, scale = UE8M0.to_disk(EXPERT, q).values()
    found = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(found, dequantize(q))


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
def test_the_config_says_what_each_engine_asks_for(format):
    kept = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.gate"]
    said = {"expert_dtype": "fp4", "routed_experts_quant_method": "mxfp4"}
    assert UE8M0.quantization_config({EXPERT: format}, kept) == {
        **DEEPSEEK_V31,
        "modules_to_not_convert": ["lm_head", BLOCK.replace("1", "0"), "model.layers.0.mlp.gate"],
        **(said if format == "mxfp4" else {}),
    }


def test_attention_in_fp8_beside_experts_in_mxfp4_is_read_as_both():
    config = UE8M0.quantization_config({EXPERT: "mxfp4", ATTENTION: "fp8_block"}, [])
    read = UE8M0.reader(config)
    assert (read(EXPERT), read(ATTENTION), read("lm_head")) == ("mxfp4", "fp8_block", None)


def test_a_scale_that_is_no_power_of_two_is_refused_with_what_to_do():
    q = quantize(weight((128, 256)), "fp8_block", scale="float32")
    with pytest.raises(UnsupportedError, match=rf"{EXPERT}: the scale .* choose the dialect fp8"):
        UE8M0.to_disk(EXPERT, q)


def test_mxfp4_outside_of_experts_is_refused():
    with pytest.raises(UnsupportedError, match=rf"{ATTENTION}: .*only for routed experts"):
        UE8M0.check(ATTENTION, "mxfp4", (128, 128))
    UE8M0.check(ATTENTION, "fp8_block", (128, 128))


def test_experts_in_two_formats_are_refused():
    other = EXPERT.replace("layers.1", "layers.2")
    with pytest.raises(UnsupportedError, match=r"in fp8_block and mxfp4, but .* one format"):
        UE8M0.quantization_config({EXPERT: "mxfp4", other: "fp8_block"}, [])


@pytest.mark.parametrize(
    ("fields", "dialect"),
    [
        ({}, "fp8-ue8m0"),
        ({"scale_fmt": None}, "fp8"),
        ({"scale_fmt": "float"}, "fp8"),
        ({"scale_fmt": None, "routed_experts_quant_method": "mxfp4"}, "fp8-ue8m0"),
        ({"scale_fmt": None, "expert_dtype": "fp4"}, "fp8-ue8m0"),
        ({"scale_fmt": None, "expert_dtype": "fp8"}, "fp8"),
        ({"quant_method": "modelopt"}, "modelopt"),
    ],
)
def test_one_dialect_claims_each_kind_of_fp8(fields, dialect):
    config = DEEPSEEK_V31 | fields
    assert find_dialect(config).name == dialect
    claiming = [d.name for d in REGISTRY.values() if d.claims(config)]
    # DeepSeek-V4 says no more; its scales have another name.
    named = ["deepseek-v4"] if "expert_dtype" in fields else []
    assert claiming == [dialect, *named]
    assert find_dialect(config, [f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"]).name == dialect


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_releases_are_read_whatever_their_dtype(scale_dtype):
    """DeepSeek-V3.1 says ue8m0 and stores FP32."""
    q = quantize(weight((128, 256)), "fp8_block")
    tensors = UE8M0.to_disk(EXPERT, q)
    name = f"{EXPERT}.weight_scale_inv"
    tensors[name] = tensors[name].float().to(scale_dtype)
    found = UE8M0.from_disk(EXPERT, "fp8_block", tensors)
    assert torch.equal(found.scale, q.scale)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_block_size", None),
        ("activation_scheme", "static"),
        ("fmt", "e5m2"),
        ("store_dtype", "mxfp4"),
        ("moe_quant_algo", "NVFP4"),
    ],
)
def test_another_kind_of_checkpoint_is_refused_by_field(field, value):
    config = UE8M0.quantization_config({EXPERT: "mxfp4"}, []) | {field: value}
    with pytest.raises(UnsupportedError, match=rf"{EXPERT}: quantization_config\.{field} is "):
        UE8M0.reader(config)(EXPERT)
