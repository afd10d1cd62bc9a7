"""The package deep_gemm, and the setting of it on which the rows of experts depend."""

from __future__ import annotations

import importlib
from typing import Any


def library() -> Any:
    """The package, which compiles with nvcc when it is used."""
    return importlib.import_module("deep_gemm")


def row_alignment() -> int:
    """The rows at whose multiples DeepGEMM now expects each expert to begin: those of its tiles.

    A setting of the process, 128 unless a library changes it.
    """
    return int(library().get_mk_alignment_for_contiguous_layout())
