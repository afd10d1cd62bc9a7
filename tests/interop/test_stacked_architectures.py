"""Stacked experts of released layouts, one by one, against the modules of transformers' classes.

The module's forward says itself what gate, up and down are; tests/models/test_round_trip.py has
whole models of every architecture.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from moequant.conversion import convert
from moequant.formats import get_format
from moequant.models import PROJECTIONS
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

E, H, I = 4, 128, 64
SIZES = {
    "vocab_size": 96,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def qwen3_5_moe(path):
    """As it was released; transformers 5 saves each expert on its own."""
    model = Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(
            **SIZES,
            moe_intermediate_size=I,
            shared_expert_intermediate_size=I,
            num_experts=E,
            num_experts_per_tok=2,
            layer_types=["full_attention", "full_attention"],
        )
    ).to(torch.bfloat16)
    weights = {name: w.contiguous() for name, w in model.state_dict().items()}
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(model.config.to_dict()))
    return [layer.mlp.experts for layer in model.model.layers], False


def qwen3_vl_moe(path):
    """As it was released; transformers 5.24 turns the matrices as it loads, and not as it saves."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": H,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text = SIZES | {
        "intermediate_size": H,
        "moe_intermediate_size": I,
        "num_experts": E,
        "num_experts_per_tok": 2,
    }
    model = Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    ).to(torch.bfloat16)
    weights = {
        name: (w.mT if ".mlp.experts." in name else w).contiguous()
        for name, w in model.state_dict().items()
    }
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(model.config.to_dict()))
    return [layer.mlp.experts for layer in model.model.language_model.layers], False


def llama4(path):
    model = Llama4ForCausalLM(
        Llama4TextConfig(
            **SIZES,
            intermediate_size=I,
            intermediate_size_mlp=H,
            num_local_experts=E,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(path)
    return [layer.feed_forward.experts for layer in model.model.layers], True


def split(experts, expert, transposed):
    """Gate, up and down [N, K] as the module's forward takes them apart."""
    gate_up, down = experts.gate_up_proj[expert].detach(), experts.down_proj[expert].detach()
    if transposed:
        gate_up, down = gate_up.T, down.T
    gate, up = gate_up.contiguous().chunk(2)
    return {"gate": gate, "up": up, "down": down.contiguous()}


@pytest.mark.parametrize("build", [qwen3_5_moe, qwen3_vl_moe, llama4])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_stacked_experts_are_converted_one_by_one(tmp_path, build, format):
    torch.manual_seed(0)
    (tmp_path / "source").mkdir()
    modules, transposed = build(tmp_path / "source")
    out = convert(tmp_path / "source", tmp_path / "out", format=format).output
    checkpoint = ConvertedCheckpoint.open(out)
    assert checkpoint.expert_layers() == tuple(range(len(modules)))
    for layer, experts in enumerate(modules):
        assert checkpoint.read_biases(layer) is None
        for expert in range(E):
            w = split(experts, expert, transposed)
            names = ["gate", "up"]
            wanted = get_format(format).quantize_fused([w["gate"], w["up"]], names=names)
            wanted.append(get_format(format).quantize(w["down"]))
            for projection, q in zip(PROJECTIONS, wanted, strict=True):
                found = checkpoint.read_expert(layer, expert, projection)
                for part, tensor in q.tensors().items():
                    assert torch.equal(found.tensors()[part].float(), tensor.float())
    report = verify(out, against=tmp_path / "source")
    assert report.ok, report.problems
