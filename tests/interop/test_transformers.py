"""What transformers makes of converted checkpoints: the weights it loads are ours, exactly."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.conversion import convert
from moequant.formats import dequantize
from moequant.runtime import load_experts
from moequant.verification.reference import evaluate_layer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
MODELS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, intermediate_size=512, moe_intermediate_size=256, num_experts=4, head_dim=64
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=4)
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            intermediate_size=512,
            moe_intermediate_size=256,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
            num_nextn_predict_layers=0,
        )
    ),
}
LOADED = ("fp8_block", "mxfp4", "w4a8")
"""Formats that transformers 5.23 loads right; nvfp4 it loads without the global scale."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Each model saved by transformers itself, in BF16."""
    paths = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        paths[name] = tmp_path_factory.mktemp(name)
        build().to(torch.bfloat16).save_pretrained(paths[name], max_shard_size="1MB")
    return paths


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory):
    """`converted(model, format)`: the folder of a converted checkpoint, made once."""
    made = {}

    def make(model, format):
        if (model, format) not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{format}") / "out"
            made[model, format] = convert(sources[model], folder, format=format).output
        return made[model, format]

    return make


def load(path):
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def experts_of(model, layer):
    """transformers' fused experts of a layer: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    block = model.model.layers[layer].mlp
    return block, block.experts.gate_up_proj, block.experts.down_proj


def decoded(path, layer, expert, projection):
    return dequantize(ConvertedCheckpoint.open(path).read_expert(layer, expert, projection))


@pytest.mark.parametrize("format", LOADED)
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_our_weights_exactly(sources, converted, name, format):
    path = converted(name, format)
    model = load(path)
    source = load(sources[name])
    layers = ConvertedCheckpoint.open(path).expert_layers()
    assert layers
    for layer in layers:
        _, gate_up, down = experts_of(model, layer)
        for expert in range(4):
            wanted = torch.cat([decoded(path, layer, expert, p) for p in ("gate", "up")])
            assert torch.equal(gate_up[expert], wanted.bfloat16())
            assert torch.equal(down[expert], decoded(path, layer, expert, "down").bfloat16())
    for (key, ours), (_, theirs) in zip(
        model.state_dict().items(), source.state_dict().items(), strict=True
    ):
        if ".mlp.experts." not in key:
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("format", LOADED)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_runtime_equals_transformers_own_block(converted, name, format):
    """Within accumulation error, with the routing that the block itself chose.

    The block runs in float32 on the weights that transformers decoded (BF16). Both it and the
    runtime are compared with the FP64 evaluation of those same weights; its bound covers float32
    accumulation in any order. The runtime uses the unrounded weights, whose rounding to BF16 moves
    each by 2**-9 of itself at most: where that happens, the decoded weights are made equal first.
    """
    path = converted(name, format)
    layer = ConvertedCheckpoint.open(path).expert_layers()[0]
    model = load(path).float()
    block, gate_up, down = experts_of(model, layer)
    gate_up.data = torch.stack(
        [
            torch.cat([decoded(path, layer, e, "gate"), decoded(path, layer, e, "up")])
            for e in range(4)
        ]
    )
    down.data = torch.stack([decoded(path, layer, e, "down") for e in range(4)])

    chosen = {}
    run = block.experts.forward

    def spy(hidden_states, top_k_index, top_k_weights):
        chosen.update(ids=top_k_index, weights=top_k_weights)
        chosen["output"] = run(hidden_states, top_k_index, top_k_weights)
        return chosen["output"]

    block.experts.forward = spy
    hidden = torch.randn(1, 9, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        block(hidden)
    rows = hidden.reshape(9, 256)
    ids, weights = chosen["ids"].reshape(9, 2), chosen["weights"].reshape(9, 2).float()
    experts = load_experts(path, layer, activations="none")
    ours = experts(rows, ids, weights)
    expected, bound = evaluate_layer(
        rows.double(),
        ids,
        weights.double(),
        gate=lambda e: gate_up[e, :256].detach().double(),
        up=lambda e: gate_up[e, 256:].detach().double(),
        down=lambda e: down[e].detach().double(),
    )
    assert expected.abs().max() > 0
    for output in (ours, chosen["output"].reshape(9, 256)):
        assert ((output.double() - expected).abs() <= bound).all()


def test_the_transformers_that_reads_nvfp4_right_will_be_noticed(converted):
    """`convert` warns that transformers drops the global scale; this fails when it no longer does.

    Then the warning goes, and nvfp4 joins LOADED.
    """
    path = converted("qwen3_moe", "nvfp4")
    _, _, down = experts_of(load(path), 0)
    ours = decoded(path, 0, 0, "down")
    global_scale = ConvertedCheckpoint.open(path).read_expert(0, 0, "down").global_scale
    assert torch.equal(down[0].float() * global_scale, ours)
    assert not torch.equal(down[0].float(), ours)
