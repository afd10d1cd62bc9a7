"""Calls with clusters of CTAs again and again: test_shared_gpu.py runs several of these at once.

    repeat_clusters.py SECONDS FORMAT[:ACTIVATIONS]...

Of each format a call with pairs, one with split-K, and one with split-K of which a CTA has many
units one behind another. Ends with an error where a kernel fails or an output is not that of the
first call.
"""

from __future__ import annotations

import sys
import time

import torch

from moequant.benchmarks.experts import inputs_of
from moequant.benchmarks.layers import random_experts
from moequant.benchmarks.shapes import SHAPES, LayerShape
from moequant.kernels.sm90.tiling import Tiling
from moequant.runtime import FusedExperts

LARGE = SHAPES["mixtral-8x7b"]
SMALL = LayerShape(experts=16, hidden=1024, intermediate=512, topk=4)


def packed_weights(shape: LayerShape, format: str, activations: str):
    """Random experts, as the kernels read them."""
    weights = random_experts(shape, format, torch.device("cuda"))
    return FusedExperts(weights, activations=activations).packed().kernel_weights


def repeat(packed, shape: LayerShape, tokens: int, tiling: Tiling, seconds: float) -> int:
    """How many calls were made."""
    device = torch.device("cuda")
    size_bytes = packed.workspace_bytes(tokens, shape.topk, tiling)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    plan = packed.plan(tokens, shape.topk, tiling=tiling, workspace=workspace)
    inputs = inputs_of(shape, tokens, device, "uniform")[0]
    outputs = [torch.empty_like(inputs.hidden) for _ in range(2)]
    plan(*inputs.arguments, outputs[0])
    calls, end = 1, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            plan(*inputs.arguments, outputs[1])
        assert torch.equal(*outputs), f"calls {calls} to {calls + 8} differ from the first"
        calls += 8
    return calls


if __name__ == "__main__":
    for case in sys.argv[2:]:
        format, _, activations = case.partition(":")
        large, small = (
            packed_weights(shape, format, activations or "format") for shape in (LARGE, SMALL)
        )
        pair = Tiling(rows=max(large.family.pair_rows), pair=True)
        for packed, shape, tokens, tiling in (
            (large, LARGE, 8192, pair),
            (large, LARGE, 16, Tiling(rows=8, split13=4, split2=4)),
            (small, SMALL, 2000, Tiling(rows=16, split13=2, split2=2)),
        ):
            print(case, tokens, tiling, "begins", flush=True)
            calls = repeat(packed, shape, tokens, tiling, float(sys.argv[1]))
            print(case, tokens, tiling, calls, "calls", flush=True)
