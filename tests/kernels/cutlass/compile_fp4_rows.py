"""Compile the Triton kernels around the FP4 GEMM for SM100, without a device of it.

Prints the name of each. Run by a test as a process of its own: kernels are interpreted in others.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moequant.act_fn import SWIGLUOAI
from moequant.kernels.cutlass import act_rows, batch_places, batch_tiles

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}


def compiles(kernel, grid, *args, num_warps, overlap, **constants):
    """Stands for `launch`."""
    names = kernel.arg_names
    signature = dict.fromkeys(names[len(args) :], "constexpr")
    for name, arg in zip(names, args, strict=False):
        signature[name] = POINTERS[arg.dtype] if isinstance(arg, torch.Tensor) else "i32"
    triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", 100, 32),
        options={"num_warps": num_warps},
    )
    print(kernel.fn.__name__)


def main():
    for module in (act_rows, batch_places, batch_tiles):
        module.launch = compiles
        module.overlaps_launches = lambda device: True
    E, C, I = 128, 64, 768
    counts = torch.zeros(E, dtype=torch.int32)
    routing, _ = batch_places.place_batches(counts, C, empty=torch.empty)
    floats = partial(torch.zeros, dtype=torch.float32)
    gate_up = torch.zeros(E * C, 2 * I, dtype=torch.bfloat16)
    where = routing.row_of_pair, routing.row_end
    act_rows.act_rows(gate_up, floats(E * C, I), SWIGLUOAI, *where, bias=floats(E, 2 * I))


if __name__ == "__main__":
    main()
