"""The two inputs of an expert's linear layers."""

from __future__ import annotations

HIDDEN, INTERMEDIATE = "hidden", "intermediate"
INPUTS = (HIDDEN, INTERMEDIATE)
"""The inputs of an expert's linear layers: of gate and up, and of down."""


def input_of(projection: str) -> str:
    """Which of INPUTS gate, up or down multiplies."""
    return INTERMEDIATE if projection == "down" else HIDDEN
