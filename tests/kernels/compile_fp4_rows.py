"""Compile the Triton kernels around the FP4 GEMM for SM100, without a device of it.

Prints a JSON line for every kernel: its name.
"""

from __future__ import annotations

from functools import partial

import torch
from compiles import Compiles

from moequant.act_fn import SWIGLUOAI
from moequant.kernels.cutlass import act_rows, batch_places, batch_tiles


def compiles(kernel, grid, *args, overlap, **constants):
    """Stands for `launch`."""
    Compiles(kernel, 100, lambda *_: {})(*args, launch_pdl=overlap, **constants)


def main():
    for module in (act_rows, batch_places, batch_tiles):
        module.launch = compiles
        module.overlaps_launches = lambda device: True
    E, C, I = 128, 64, 768
    counts = torch.zeros(E, dtype=torch.int32)
    routing, _ = batch_places.place_batches(counts, C, empty=torch.empty)
    floats = partial(torch.zeros, dtype=torch.float32)
    gate_up = torch.zeros(E * C, 2 * I, dtype=torch.bfloat16)
    where = {"row_of_pair": routing.row_of_pair, "row_end": routing.row_end}
    act_rows.act_rows(gate_up, floats(E * C, I), SWIGLUOAI, **where, bias=floats(E, 2 * I))


if __name__ == "__main__":
    main()
