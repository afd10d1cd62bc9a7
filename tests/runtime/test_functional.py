from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.layouts.gate_up import stack_gate_up
from moequant.runtime import FusedExperts, functional
from moequant.runtime.backends import REGISTRY
from moequant.runtime.functional import deep_gemm_moe_fp8, fused_experts


def test_it_computes_what_the_module_does(layers):
    layer = layers.make("w4a8")
    hidden, ids, topk_weights = layer.call
    for options in ({}, {"activations": "none"}, {"backend": "naive_batched"}):
        got = fused_experts(hidden, layer.weights, topk_weights, ids, **options)
        assert torch.equal(got, FusedExperts(layer.weights, **options)(*layer.call))


def test_it_takes_an_expert_map_and_weights_the_input(layers):
    layer = layers.make("mxfp4", T=1)
    options = {
        "expert_map": torch.tensor([1, -1, 0, 5, 4, 3]), "apply_router_weight_on_input": True,
    }  # fmt: skip
    got = fused_experts(layer.hidden, layer.weights, layer.topk_weights, layer.ids, **options)
    assert torch.equal(got, FusedExperts(layer.weights)(*layer.call, **options))


def test_what_it_keeps_goes_with_the_weights(layers):
    layer = layers.make()
    weights, (hidden, ids, topk_weights) = layer.weights, layer.call
    for _ in range(2):
        fused_experts(hidden, weights, topk_weights, ids)
    (module,) = functional._MODULES[weights].values()
    gone = weakref.ref(module)
    before = len(functional._MODULES)
    del module, weights, layer
    gc.collect()
    assert gone() is None
    assert len(functional._MODULES) == before - 1


def test_what_cannot_run_is_refused(layers):
    layer = layers.make()
    with pytest.raises(UnsupportedError, match="no backend 'fast'"):
        fused_experts(*(layer.hidden, layer.weights, layer.topk_weights, layer.ids), backend="fast")
    with pytest.raises(UnsupportedError, match="topk_ids"):
        fused_experts(layer.hidden, layer.weights, layer.topk_weights, layer.ids[:3])


def test_deep_gemm_moe_fp8_checks_a_call_before_it_runs(layers, monkeypatch):
    """As if DeepGEMM ran here: what is refused never comes to it."""
    monkeypatch.setattr(REGISTRY["deepgemm"], "supports", lambda workload: None)
    layer = layers.make()
    w13 = stack_gate_up(layer.weights.gate, layer.weights.up)
    down = layer.weights.down
    parts = (w13.qdata, down.qdata, w13.scale, down.scale)
    hidden, ids, topk_weights = layer.call
    for call, options, message in (
        ((hidden[0], topk_weights, ids), {}, r"hidden_states is \[256\]"),
        ((hidden.double(), topk_weights, ids), {}, "hidden_states is torch.float64"),
        ((hidden[:, :5], topk_weights, ids), {}, r"want \[M, 256\]"),
        ((hidden, topk_weights, ids.float()), {}, "topk_ids is torch.float32"),
        ((hidden, topk_weights[1:], ids), {}, r"both want \[M, T\]"),
        ((hidden, topk_weights, ids), {"apply_router_weight_on_input": True}, "one expert a token"),
        ((hidden, topk_weights, ids), {"expert_map": hidden}, "expert_map is torch.float32"),
        ((hidden, topk_weights, ids.to("meta")), {}, "topk_ids is on meta"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            deep_gemm_moe_fp8(call[0], *parts, *call[1:], **options)
