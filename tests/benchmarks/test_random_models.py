from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from moequant.benchmarks.random_models import MODELS, RandomModel, random_model
from moequant.conversion import convert
from moequant.errors import ArgumentError

SMALL = {
    "qwen3-30b": {
        "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
    "deepseek-v3": {
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
        "n_routed_experts": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt-oss-120b": {
        "hidden_size": 256, "intermediate_size": 256, "num_local_experts": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
SMALL["gpt-oss-20b"] = SMALL["gpt-oss-120b"]


def small(name, layers=2):
    model = random_model(name)
    return RandomModel({**model.config, **SMALL[name]}, model.tensors).resized(layers, 128)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_finds_every_tensor_and_no_other(tmp_path, name):
    small(name).write(tmp_path, torch.device("cpu"))
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_converted_into_what_engines_load(tmp_path, name):
    small(name).write(tmp_path / "source", torch.device("cpu"))
    result = convert(tmp_path / "source", tmp_path / "out", format="mxfp4")
    config = json.loads((result.output / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == (
        "mxfp4" if name.startswith("gpt-oss") else "compressed-tensors"
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b", 30.5), ("deepseek-v3", 671.0), ("gpt-oss-120b", 116.8), ("gpt-oss-20b", 20.9)],
)
def test_the_whole_model_has_as_many_weights_as_the_release(name, billions):
    """Counted by transformers' class, which the test above compares with the tensors."""
    config = random_model(name).resized(random_model(name).config["num_hidden_layers"]).config
    fields = {key: value for key, value in config.items() if key not in ("architectures",)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert weights == pytest.approx(billions * 1e9, rel=5e-3)


def test_experts_repeat_a_few_in_memory_of_their_own(tmp_path):
    small("qwen3-30b", layers=1).write(tmp_path, torch.device("cpu"))
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        at = "model.layers.0.mlp.experts.{}.up_proj.weight"
        first, second, fifth = (tensors.get_tensor(at.format(e)) for e in (0, 1, 4))
    assert torch.equal(first, fifth)
    assert not torch.equal(first, second)


def test_some_layers_of_a_small_deepseek_hold_experts():
    dense = [small("deepseek-v3", n).config["first_k_dense_replace"] for n in (3, 4, 8, 12, 61)]
    assert dense == [0, 1, 2, 3, 3]


def test_wrong_sizes_and_names_are_refused():
    with pytest.raises(ArgumentError, match="unknown model 'qwen4'; use one of: qwen3-30b"):
        random_model("qwen4")
    with pytest.raises(ArgumentError, match="0 layers"):
        random_model("qwen3-30b").resized(0)
    with pytest.raises(ArgumentError, match="vocabulary of 3"):
        random_model("qwen3-30b").resized(1, 3)
