"""A call of a layer of routed experts in vLLM, of which `load_experts` takes the same."""

from __future__ import annotations

import torch


def call(hidden=256):
    """Nine tokens [9, hidden] in BF16, and weights and ids of the two of four experts of each."""
    generator = torch.Generator().manual_seed(0)
    weights, ids = torch.rand(9, 4, generator=generator).topk(2)
    return torch.randn(9, hidden, generator=generator).bfloat16(), weights, ids.int()


def run(layer, hidden, weights, ids):
    """What the plug-in's method returns for it."""
    return layer.quant_method.apply(layer, hidden, weights, ids, None, None)
