"""DeepSeek-V4 as it was released: MXFP4 experts among FP8 layers, all scales E8M0."""

from __future__ import annotations

import json

import pytest
import torch

from moequant.conversion import convert
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint


def test_bf16_gives_every_number_back(deepseek_v4, read_tensors, config_of, tmp_path):
    path, numbers = deepseek_v4.path, deepseek_v4.numbers
    result = convert(path, tmp_path / "out", format="bf16")
    found = read_tensors(tmp_path / "out")
    for name, wanted in numbers.items():
        assert torch.equal(found[name].double(), wanted), name
    assert not any(name.endswith(".scale") for name in found)
    assert sum(error.exact for error in result.requantization_errors) == len(numbers)
    assert not {"expert_dtype", "quantization_config"} & config_of(tmp_path / "out").keys()
    assert verify(tmp_path / "out", against=path).ok


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_block"])
def test_experts_become_what_other_engines_read_number_for_number(
    deepseek_v4, read_tensors, config_of, tmp_path, format
):
    path, numbers = deepseek_v4.path, deepseek_v4.numbers
    result = convert(path, tmp_path / "out", format=format)
    assert all(error.exact == error.weights for error in result.requantization_errors)
    converted = ConvertedCheckpoint.open(tmp_path / "out")
    experts = [name for name in numbers if name.startswith("layers.0.ffn.experts.")]
    assert len(experts) == 3 * 2
    for name in experts:
        q = converted.read(name.removesuffix(".weight"))
        assert torch.equal(dequantize(q).double(), numbers[name]), name
    found = read_tensors(tmp_path / "out")
    assert found["layers.0.attn.wo_a.weight"].dtype == torch.bfloat16
    assert "expert_dtype" not in config_of(tmp_path / "out")
    assert verify(tmp_path / "out", against=path).ok


def test_an_unknown_expert_dtype_is_refused(deepseek_v4, config_of, tmp_path):
    path = deepseek_v4.path
    (path / "config.json").write_text(json.dumps(config_of(path) | {"expert_dtype": "fp6"}))
    with pytest.raises(UnsupportedError, match="expert_dtype is 'fp6'"):
        convert(path, tmp_path / "out", format="bf16")
