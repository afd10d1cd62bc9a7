"""Compile the quantizers of block-scaled GEMMs for an architecture, without a device of it.

    compile_block_scaled.py CAPABILITY

Prints a JSON line for every kernel: its name, scheme, whether that has a static scale, and PTX.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from compiles import Compiles

from moequant.kernels import block_scaled_quantize as module
from moequant.kernels.routing import Grouping, SortedRouting


def describe(compiled, constants):
    return {
        "scheme": constants.get("SCHEME"),
        "static": constants.get("STATIC"),
        "ptx": compiled.asm["ptx"],
    }


def main(capability):
    module.has_native_e4m3 = lambda device: capability >= 89
    module.overlaps_launches = lambda device: capability >= 90
    for name in ("place_scale_rows", "quantize_block_scaled_row"):
        setattr(module, name, Compiles(getattr(module, name), capability, describe))
    grouping = Grouping(experts=128, tile_rows=64)
    ids = torch.zeros(16, 8, dtype=torch.int32)
    routing = SortedRouting.allocate(128, grouping, empty=torch.empty)
    places = module.ScalePlaces.allocate(128, 128, empty=torch.empty)
    module.place_scales(ids, routing, places, grouping)
    for scheme, static in product(("nvfp4", "mxfp4", "mxfp8"), (None, torch.ones(128))):
        if static is None or scheme == "nvfp4":
            out = module.BlockScaledRows.allocate(scheme, 128, 7168, 128, empty=torch.empty)
            x = torch.zeros(16, 7168, dtype=torch.bfloat16)
            module.quantize_sorted(x, out, routing, places, topk=8, static=static)


if __name__ == "__main__":
    main(int(sys.argv[1]))
