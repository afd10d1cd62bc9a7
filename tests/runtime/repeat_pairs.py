"""For each format, a call with pairs of CTAs again and again: test_shared_gpu.py runs several.

    repeat_pairs.py SECONDS FORMAT[:ACTIVATIONS]...

Ends with an error where a kernel fails or an output is not that of the first call.
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

TOKENS = 8192


def repeat(format: str, activations: str, seconds: float) -> int:
    """How many calls were made."""
    shape, device = SHAPES["mixtral-8x7b"], torch.device("cuda")
    module = FusedExperts(random_experts(shape, format, device), activations=activations)
    packed = module.packed().kernel_weights
    tiling = Tiling(rows=max(packed.family.pair_rows), pair=True)
    size_bytes = packed.workspace_bytes(TOKENS, shape.topk, tiling)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    plan = packed.plan(TOKENS, shape.topk, tiling=tiling, workspace=workspace)
    inputs = inputs_of(shape, TOKENS, device, "uniform")[0]
    outputs = [torch.empty_like(inputs.hidden) for _ in range(2)]
    plan(*inputs.arguments, outputs[0])
    calls, end = 1, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            plan(*inputs.arguments, outputs[1])
        assert torch.equal(*outputs), (
            f"{format}: calls {calls} to {calls + 8} differ from the first"
        )
        calls += 8
    return calls


if __name__ == "__main__":
    for case in sys.argv[2:]:
        name, _, scheme = case.partition(":")
        print(case, "begins", flush=True)
        print(case, repeat(name, scheme or "format", float(sys.argv[1])), "calls", flush=True)
