"""Compile Triton kernels for an architecture, without a device of it.

For the scripts beside it, which tests run as processes of their own: kernels are interpreted in
the others.
"""

from __future__ import annotations

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class Compiles:
    """Stands for a kernel: a launch compiles it, and prints what `describe` makes of that."""

    def __init__(self, kernel, capability, describe):
        self.kernel, self.capability, self.describe = kernel, capability, describe

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **constants):
        names = self.kernel.arg_names
        options = {name: constants.pop(name) for name in constants.keys() - set(names)}
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
            options=options,
        )
        about = {"kernel": self.kernel.fn.__name__, **self.describe(compiled, constants)}
        print(json.dumps(about))
