"""DeepSeek-V4 as it was released: MXFP4 experts among FP8 layers, all scales E8M0."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.conversion import convert
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.verification import verify

H, I, EXPERTS = 256, 128, 2
CONFIG = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


@pytest.fixture
def source(by_hand, tmp_path):
    """Its folder, and the numbers of its quantized weights."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "embed.weight": torch.randn(64, H).bfloat16(),
        "head.weight": torch.randn(64, H).bfloat16(),
        "norm.weight": torch.ones(H).bfloat16(),
        "layers.0.ffn.gate.weight": torch.randn(EXPERTS, H).bfloat16(),
    }
    numbers = {}

    def add(module, encoded, renamed):
        numbers[f"{module}.weight"] = encoded.numbers
        for old, new in renamed.items():
            tensors[f"{module}.{new}"] = encoded.tensors[old]

    shapes = {"w1": (I, H), "w2": (H, I), "w3": (I, H)}
    for leaf, shape in shapes.items():
        for parent in ("layers.0.ffn.experts.0", "layers.0.ffn.experts.1", "mtp.0.ffn.experts.0"):
            encoded = by_hand.mxfp4(shape, generator)
            byte = encoded.tensors["weight_scale"]
            encoded.tensors["weight_scale"] = byte.view(torch.float8_e8m0fnu)
            encoded.tensors["weight_packed"] = encoded.tensors["weight_packed"].view(torch.int8)
            add(f"{parent}.{leaf}", encoded, {"weight_packed": "weight", "weight_scale": "scale"})
        blocks = by_hand.fp8_block(shape, generator, scale_dtype=torch.float8_e8m0fnu)
        module = f"layers.0.ffn.shared_experts.{leaf}"
        add(module, blocks, {"weight": "weight", "weight_scale_inv": "scale"})
    blocks = by_hand.fp8_block((H, H), generator, scale_dtype=torch.float8_e8m0fnu)
    add("layers.0.attn.wo_a", blocks, {"weight": "weight", "weight_scale_inv": "scale"})
    path = tmp_path / "source"
    path.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path, numbers


def test_bf16_gives_every_number_back(source, read_tensors, config_of, tmp_path):
    path, numbers = source
    result = convert(path, tmp_path / "out", format="bf16")
    found = read_tensors(tmp_path / "out")
    for name, wanted in numbers.items():
        assert torch.equal(found[name].double(), wanted), name
    assert not any(name.endswith(".scale") for name in found)
    assert sum(loss.exact for loss in result.losses) == len(numbers)
    assert not {"expert_dtype", "quantization_config"} & config_of(tmp_path / "out").keys()
    assert verify(tmp_path / "out", against=path).ok


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_block"])
def test_experts_become_what_other_engines_read_number_for_number(
    source, read_tensors, config_of, tmp_path, format
):
    path, numbers = source
    result = convert(path, tmp_path / "out", format=format)
    assert all(loss.exact == loss.weights for loss in result.losses)
    converted = ConvertedCheckpoint.open(tmp_path / "out")
    experts = [name for name in numbers if name.startswith("layers.0.ffn.experts.")]
    assert len(experts) == 3 * EXPERTS
    for name in experts:
        q = converted.read(name.removesuffix(".weight"))
        assert torch.equal(dequantize(q).double(), numbers[name]), name
    found = read_tensors(tmp_path / "out")
    assert found["layers.0.attn.wo_a.weight"].dtype == torch.bfloat16
    assert "expert_dtype" not in config_of(tmp_path / "out")
    assert verify(tmp_path / "out", against=path).ok


def test_an_unknown_expert_dtype_is_refused(source, tmp_path):
    path, _ = source
    (path / "config.json").write_text(json.dumps(CONFIG | {"expert_dtype": "fp6"}))
    with pytest.raises(UnsupportedError, match="expert_dtype is 'fp6'"):
        convert(path, tmp_path / "out", format="bf16")
