"""Compile the kernel that rounds columns for an architecture, without a device of it.

    compile_gptq_columns.py CAPABILITY

Prints a JSON line for every element: bytes of shared memory, and its name.
"""

from __future__ import annotations

import sys
import warnings

import torch
from compiles import Compiles

from moequant.kernels import gptq_columns


def describe(compiled, constants):
    return {"shared": compiled.metadata.shared, "ELEMENT": constants["ELEMENT"]}


def main(capability):
    warnings.simplefilter("ignore")
    gptq_columns.round_block = Compiles(gptq_columns.round_block, capability, describe)
    numbers = torch.zeros(64, 64, dtype=torch.float64)
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    for element in ("e2m1", "e4m3", "int4"):
        gptq_columns.round_columns(element, numbers, numbers, codes, numbers, numbers)


if __name__ == "__main__":
    main(int(sys.argv[1]))
