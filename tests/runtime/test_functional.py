from __future__ import annotations

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, pack_experts
from moequant.runtime.backends import REGISTRY
from moequant.runtime.backends.stacked import STACKED
from moequant.runtime.functional import deep_gemm_moe_fp8, fused_experts


def test_it_computes_what_the_module_does(layers):
    layer = layers.make("w4a8")
    hidden, topk_weights, ids = layer.call
    for options in ({}, {"activations": "none"}, {"backend": "naive_batched"}):
        packed = pack_experts(layer.weights, **options)
        got = fused_experts(hidden, packed, topk_weights, ids)
        assert torch.equal(got, FusedExperts(layer.weights, **options)(*layer.call))
        assert torch.equal(FusedExperts(packed, **options)(*layer.call), got)


def test_it_takes_an_expert_map_and_weights_the_input(layers):
    layer = layers.make("mxfp4", T=1)
    options = {
        "expert_map": torch.tensor([1, -1, 0, 5, 4, 3]), "apply_router_weight_on_input": True,
    }  # fmt: skip
    packed = pack_experts(layer.weights)
    got = fused_experts(layer.hidden, packed, layer.topk_weights, layer.ids, **options)
    assert torch.equal(got, FusedExperts(layer.weights)(*layer.call, **options))


def test_what_cannot_run_is_refused(layers):
    layer = layers.make()
    hidden, topk_weights, ids = layer.call
    with pytest.raises(UnsupportedError, match="unknown backend 'fast'"):
        pack_experts(layer.weights, backend="fast")
    packed = pack_experts(layer.weights)
    with pytest.raises(UnsupportedError, match="topk_ids"):
        fused_experts(hidden, packed, topk_weights, ids[:3])
    with pytest.raises(UnsupportedError, match=r"experts is ExpertWeights, .* pack_experts makes"):
        fused_experts(hidden, layer.weights, topk_weights, ids)


def test_deep_gemm_moe_fp8_checks_a_call_before_it_runs(layers, monkeypatch):
    """As if DeepGEMM ran here: what is refused never comes to it."""
    monkeypatch.setattr(REGISTRY["deepgemm"], "supports", lambda workload: None)
    layer = layers.make()
    w = STACKED.pack(layer.weights)
    parts = tuple(w[name] for name in ("w13_qdata", "w2_qdata", "w13_scale", "w2_scale"))
    hidden, topk_weights, ids = layer.call
    for call, options, message in (
        ((hidden[0], topk_weights, ids), {}, r"hidden_states is \[256\]"),
        ((hidden.double(), topk_weights, ids), {}, "hidden_states is torch.float64"),
        ((hidden[:, :5], topk_weights, ids), {}, r"need \[M, 256\]"),
        ((hidden, topk_weights, ids.float()), {}, "topk_ids is torch.float32"),
        ((hidden, topk_weights[1:], ids), {}, r"both must be \[M, T\]"),
        (
            (hidden, topk_weights, ids),
            {"apply_router_weight_on_input": True},
            "one expert per token",
        ),
        ((hidden, topk_weights, ids), {"expert_map": hidden}, "expert_map is torch.float32"),
        ((hidden, topk_weights, ids.to("meta")), {}, "topk_ids is on meta"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            deep_gemm_moe_fp8(call[0], *parts, *call[1:], **options)
