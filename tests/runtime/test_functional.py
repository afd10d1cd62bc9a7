from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, functional
from moequant.runtime.functional import fused_experts


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
