"""Calls with clusters of CTAs again and again: test_shared_gpu.py runs several of these at once.

    repeat_clusters.py SECONDS FORMAT[:ACTIVATIONS]...

Of each format a call with pairs and one with split-K. Ends with an error where a kernel fails or an
output is not that of the first call.
"""

from __future__ import annotations

import sys
import time

import torch

from moequant.benchmarks.experts import inputs_of
from moequant.benchmarks.layers import random_experts
from moequant.benchmarks.shapes import SHAPES
from moequant.kernels.sm90.tiling import Tiling
from moequant.runtime import FusedExperts

SHAPE = SHAPES["mixtral-8x7b"]


def repeat(packed, tokens: int, tiling: Tiling, seconds: float) -> int:
    """How many calls were made."""
    device = torch.device("cuda")
    size_bytes = packed.workspace_bytes(tokens, SHAPE.topk, tiling)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    plan = packed.plan(tokens, SHAPE.topk, tiling=tiling, workspace=workspace)
    inputs = inputs_of(SHAPE, tokens, device, "uniform")[0]
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
        weights = random_experts(SHAPE, format, torch.device("cuda"))
        packed = FusedExperts(weights, activations=activations or "format").packed().kernel_weights
        pair = Tiling(rows=max(packed.family.pair_rows), pair=True)
        for tokens, tiling in ((8192, pair), (16, Tiling(rows=8, split13=4, split2=4))):
            print(case, tokens, tiling, "begins", flush=True)
            calls = repeat(packed, tokens, tiling, float(sys.argv[1]))
            print(case, tokens, tiling, calls, "calls", flush=True)
