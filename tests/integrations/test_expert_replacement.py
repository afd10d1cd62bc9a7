"""Models of transformers whose experts are replaced by those of a converted checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from moequant.errors import UnsupportedError
from moequant.integrations.transformers import load_model, replace_experts


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_built_model_runs_as_a_loaded_one_does(sources, converted, prompt, name):
    model = AutoModelForCausalLM.from_pretrained(sources(name))
    for format in ("nvfp4", "fp8_block"):  # the second replaces what the first put there
        path = converted(name, format)
        replace_experts(model, path)
        assert torch.equal(model(prompt).logits, load_model(path)(prompt).logits)


def test_a_model_of_another_architecture(sources, converted):
    model = AutoModelForCausalLM.from_pretrained(sources("mixtral"))
    with pytest.raises(UnsupportedError, match="'qwen3_moe', but the model has 'mix"):
        replace_experts(model, converted("qwen3_moe", "mxfp4"))


def test_a_model_without_experts(converted):
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1, hidden_size=64, vocab_size=8))
    with pytest.raises(UnsupportedError, match="'mixtral', but the model has 'qwen3"):
        replace_experts(model, converted("mixtral", "mxfp4"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_hidden_layers": 3}, r"layers 2, but the model has 3"),
        ({"num_local_experts": 8}, r"experts per layer 4, but the model has 8"),
        ({"hidden_size": 128}, r"hidden size 256, but the model has 128"),
        ({"intermediate_size": 512}, r"intermediate size 256, but the model has 512"),
        ({"hidden_act": "gelu"}, r"activation function silu, but the model has gelu"),
    ],
)
def test_a_model_of_other_sizes(models, converted, sizes, message):
    with pytest.raises(UnsupportedError, match=f"{message}; use a checkpoint converted from"):
        replace_experts(models["mixtral"](**sizes), converted("mixtral", "mxfp4"))


def test_a_model_with_experts_in_other_layers(models, converted):
    model = models["qwen3_moe"](mlp_only_layers=[0])
    with pytest.raises(UnsupportedError, match=r"layers with experts 0, 1, but the model has 1"):
        replace_experts(model, converted("qwen3_moe", "mxfp4"))


def test_a_model_that_holds_its_experts_otherwise(models, converted):
    model = models["mixtral"]()
    model.model.layers[1].mlp.experts = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UnsupportedError, match=r"experts of layer 1 are a ModuleList"):
        replace_experts(model, converted("mixtral", "mxfp4"))
    del model.model.layers[1].mlp.experts
    with pytest.raises(UnsupportedError, match=r"in layers 0, but the checkpoint has them in 0, 1"):
        replace_experts(model, converted("mixtral", "mxfp4"))


def test_a_model_without_weights(models, converted):
    with torch.device("meta"):
        model = models["mixtral"]()
    with pytest.raises(UnsupportedError, match=r"layer 0 of the model is on the meta device"):
        replace_experts(model, converted("mixtral", "mxfp4"))
