"""INT4 weights with one FP32 scale per group of columns, of any group size; read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats.base import Format
from moequant.formats.elements import INT4

if TYPE_CHECKING:
    from moequant.formats.base import QuantizedWeight


class Int4(Format):
    """`w = qdata * scale`, as in compressed-tensors' W4A16 and Kimi-K2-Thinking.

    The group size is that of the checkpoint: K divided by the scale's columns.
    """

    name = "int4"
    summary = "INT4, one scale per group of columns or per row, weight only"
    uses = frozenset({"read"})
    block = (1, 32)
    element = INT4
    scale_dtype = torch.float32
    activations = "none"

    def block_of(self, q: QuantizedWeight) -> tuple[int, int]:
        """As Format; the group size follows from the scale's shape."""
        return 1, q.shape[-1] // q.scale.shape[-1]
