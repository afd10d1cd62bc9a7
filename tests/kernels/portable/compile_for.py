"""Compile the portable kernels for an architecture, without a device of it; prints JSON.

    compile_for.py CAPABILITY FORMAT/ACTIVATIONS/DTYPE ...

One line for every kernel: bytes of shared memory, and what it is. Run by test_compile.py as a
process of its own: kernels are interpreted in the others.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moequant.formats import get_format
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.portable import portable_fused, portable_grouped_gemm, quantize
from moequant.runtime import ExpertWeights
from moequant.runtime.backends.triton_portable import portable_experts

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


class Compiles:
    """Stands for a kernel: a launch compiles it."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, num_warps, num_stages=3, launch_pdl, **constants):
        names = self.kernel.arg_names
        signature = dict.fromkeys(names[len(args) :], "constexpr")
        aligned = {}
        for i, arg in enumerate(args):
            is_tensor = isinstance(arg, torch.Tensor)
            signature[names[i]] = POINTERS[arg.dtype] if is_tensor else "i32"
            if is_tensor:
                aligned[(i,)] = [["tt.divisibility", 16]]
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", self.capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        what = {k: constants.get(k) for k in ("ELEMENT", "X_SCHEME", "OUT_SCHEME", "BLOCK_M")}
        print(json.dumps({"shared": compiled.metadata.shared, "kernel": names[0], **what}))


def main(capability, *cases):
    warnings.simplefilter("ignore")
    for module in (portable_grouped_gemm, quantize):
        module.has_native_e4m3 = lambda device: capability >= 89
        module.overlaps_launches = lambda device: capability >= 90
    portable_grouped_gemm.experts_gemm = Compiles(portable_grouped_gemm.experts_gemm, capability)
    quantize.quantize_row = Compiles(quantize.quantize_row, capability)
    portable_fused.sort_routing = portable_fused.weighted_reduce = lambda *args, **options: None
    for case in cases:
        format, activations, dtype = case.split("/")
        fmt = get_format(format)
        gate, up, down = (fmt.quantize(torch.ones(1, 512, 512)) for _ in range(3))
        scheme = fmt.activations if activations == "format" else "none"
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


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
