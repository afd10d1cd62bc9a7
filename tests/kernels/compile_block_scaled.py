"""Compile the quantizers of block-scaled GEMMs for an architecture, without a device of it.

    compile_block_scaled.py CAPABILITY

Prints a JSON line for every kernel: its name, scheme and PTX. Run by a test as a process of its
own: kernels are interpreted in the others.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moequant.kernels import block_scaled_quantize as module
from moequant.kernels.routing import Grouping, SortedRouting

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class Compiles:
    """Stands for a kernel: a launch compiles it."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability

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
        kernel = self.kernel.fn.__name__
        scheme = constants.get("SCHEME")
        print(json.dumps({"kernel": kernel, "scheme": scheme, "ptx": compiled.asm["ptx"]}))


def main(capability):
    module.has_native_e4m3 = lambda device: capability >= 89
    module.overlaps_launches = lambda device: capability >= 90
    for name in ("place_scale_rows", "quantize_row"):
        setattr(module, name, Compiles(getattr(module, name), capability))
    grouping = Grouping(experts=128, tile_rows=64)
    ids = torch.zeros(16, 8, dtype=torch.int32)
    routing = SortedRouting.allocate(128, grouping, device=torch.device("cpu"))
    places = module.ScalePlaces.allocate(128, 128, empty=torch.empty)
    module.place_scales(ids, routing, places, grouping)
    for scheme, static in product(("nvfp4", "mxfp4", "mxfp8"), (None, torch.ones(128))):
        if static is None or scheme == "nvfp4":
            out = module.BlockScaledRows.allocate(scheme, 128, 7168, 128, empty=torch.empty)
            x = torch.zeros(16, 7168, dtype=torch.bfloat16)
            module.quantize_sorted(x, out, routing, places, topk=8, static=static)


if __name__ == "__main__":
    main(int(sys.argv[1]))
