"""Compile the portable kernels for an architecture, without a device of it.

    compile_portable.py CAPABILITY FORMAT/ACTIVATIONS/DTYPE ...

Prints a JSON line for every kernel: bytes of shared memory, and what it is.
"""

from __future__ import annotations

import sys
import warnings

import torch
from compiles import Compiles

from moequant.formats import get_format
from moequant.kernels import tensor_scale
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.portable import portable_fused, portable_grouped_gemm, quantize
from moequant.runtime import ExpertWeights
from moequant.runtime.backends.triton_portable import portable_experts

NAMES = ("ELEMENT", "X_SCHEME", "OUT_SCHEME", "BLOCK_M")


def describe(compiled, constants):
    return {"shared": compiled.metadata.shared, **{name: constants.get(name) for name in NAMES}}


def main(capability, *cases):
    warnings.simplefilter("ignore")
    for module in (portable_grouped_gemm, quantize):
        module.has_native_e4m3 = lambda device: capability >= 89
    for module in (portable_grouped_gemm, quantize, tensor_scale):
        module.overlaps_launches = lambda device: capability >= 90
    for module, name in (
        (portable_grouped_gemm, "experts_gemm"),
        (quantize, "quantize_row"),
        (tensor_scale, "find_largest"),
        (tensor_scale, "find_scale"),
    ):
        setattr(module, name, Compiles(getattr(module, name), capability, describe))
    portable_fused.sort_routing = portable_fused.weighted_reduce = lambda *args, **options: None
    for case in cases:
        format, activations, dtype = case.split("/")
        fmt = get_format(format)
        gate, up, down = (fmt.quantize(torch.ones(1, 512, 512)) for _ in range(3))
        scheme = fmt.activations if activations == "format" else activations
        packed = portable_experts(ExpertWeights(gate=gate, up=up, down=down), scheme)
        hidden = torch.zeros(64, 512, dtype=getattr(torch, dtype))
        for M in (1, 64):
            ids = torch.zeros(M, 1, dtype=torch.int32)
            size = WorkspaceArena()
            portable_fused.PortablePlan(packed, M, 1, size, hidden.dtype)
            arena = WorkspaceArena(torch.empty(size.size_bytes, dtype=torch.uint8))
            plan = portable_fused.PortablePlan(packed, M, 1, arena, hidden.dtype)
            x, out = hidden[:M], torch.empty_like(hidden[:M])
            plan(x, torch.ones(M, 1), ids, out)
        if packed.tensor_scale:  # of batches, too
            scale = tensor_scale.TensorScale.allocate(empty=torch.empty)
            scale.find(hidden, counts=torch.ones(1, dtype=torch.int32), capacity=64)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
