"""FusedExperts in place of the experts of transformers' own MoE blocks, routing and all."""

from __future__ import annotations

import pytest
import torch

from moequant.formats import dequantize
from moequant.runtime import FusedExperts

deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")

U = 2.0**-24


def qwen3_moe_block():
    config = qwen.Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    return qwen.Qwen3MoeSparseMoeBlock(config)


def deepseek_v3_block():
    config = deepseek.DeepseekV3Config(
        hidden_size=256,
        moe_intermediate_size=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    return deepseek.DeepseekV3MoE(config)


def with_weights(block, weights):
    """The block carrying the decoded experts, and a router and shared expert of its own."""
    g = torch.Generator().manual_seed(1)
    for parameter in (*block.parameters(), *block.buffers()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.06)
    gate_up = torch.cat([dequantize(weights.gate), dequantize(weights.up)], dim=1)
    block.experts.gate_up_proj.data.copy_(gate_up)
    block.experts.down_proj.data.copy_(dequantize(weights.down))
    return block.eval()


@pytest.mark.parametrize("make_block", [qwen3_moe_block, deepseek_v3_block])
def test_layer_equals_the_block_of_transformers(layers, every_format, make_block):
    layer = layers.make(every_format, E=8, M=40)
    block = with_weights(make_block(), layer.weights)
    with torch.no_grad():
        theirs = block(layer.hidden[None])[0]
        _, topk_weights, ids = block.gate(layer.hidden)
        shared = block.shared_experts(layer.hidden) if hasattr(block, "shared_experts") else None
    assert ids.unique().numel() > 4
    ours = FusedExperts(layer.weights, activations="none")(layer.hidden, ids, topk_weights)
    # Either side is a float32 evaluation of the routed experts, so either lies within the bound.
    _, bound = layer.evaluate(ids=ids, topk_weights=topk_weights)
    bound = 2 * bound
    if shared is not None:
        ours = ours + shared
        bound += 2 * U * ours.double().abs()
    assert ((ours.double() - theirs.double()).abs() <= bound).all()
    assert bound.max() < 0.05 * ours.abs().max()
