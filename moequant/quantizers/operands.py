"""Operands of kernels: the weight that is read, and the one that is written or compared with.

A weight is plain numbers, or codes with scales. For any block shape, a kernel finds the scale of
the i-th number in row-major order at `i >> shift`. If a format's scales are not stored that way,
they are expanded to one scale per row and run of columns, a power of two of at least 16.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from moequant.formats import QuantizedWeight, get_format
from moequant.formats.blocks import expand_blocks
from moequant.native_code.vectors import F32, I32, I64, PTR, Function

if TYPE_CHECKING:
    from torch import Tensor

LEAST_RUN = 16
"""Fewest consecutive numbers that must share a scale for kernels to read codes."""
_LONGEST_RUN = 128

PARAMETERS = {
    "w": PTR,
    "w_scale": PTR,
    "w_shift": I64,
    "w_global_scale": F32,
    "rows": I64,
    "columns": I64,
    "qdata": PTR,
    "scale": PTR,
    "shift": I64,
    "global_scale": F32,
    "scratch": PTR,
    "importance": PTR,
}
"""The parameters of every kernel: an operand, the sizes N and K, another operand, memory for
temporaries, and how much the error of each column counts."""


def new_kernel() -> Function:
    """An empty kernel with PARAMETERS and a result of type i32."""
    return Function("kernel", PARAMETERS, I32)


class Operand(NamedTuple):
    """A weight in memory.

    Attributes:
        data: numbers or codes, contiguous.
        scale: one scale per 2**shift numbers, contiguous; None for plain numbers.
        shift: log2 of how many consecutive numbers share a scale.
        global_scale: multiplier of all numbers; 0 if the format has none.
    """

    data: Tensor
    scale: Tensor | None = None
    shift: int = 0
    global_scale: float = 0.0

    def arguments(self) -> tuple[int, int, int, float]:
        """Arguments in the order of PARAMETERS; addresses are valid while this object exists."""
        scale = 0 if self.scale is None else self.scale.data_ptr()
        return self.data.data_ptr(), scale, self.shift, self.global_scale


def run_of(q: QuantizedWeight) -> int:
    """How many consecutive numbers of a weight [N, K] are sure to share a scale.

    A power of two up to 128; 0 for an empty weight.
    """
    return (
        math.gcd(q.shape[1], get_format(q.format).block_of(q)[1], _LONGEST_RUN)
        if q.shape.numel()
        else 0
    )


def operand_of(weight: Tensor | QuantizedWeight) -> Operand:
    """A weight [N, K] as kernels read it; for codes, `run_of` must be at least LEAST_RUN."""
    if not isinstance(weight, QuantizedWeight):
        return Operand(data=weight.contiguous())
    if get_format(weight.format).is_plain:
        return Operand(data=weight.qdata.contiguous())
    run = run_of(weight)
    return Operand(
        data=weight.qdata.contiguous(),
        scale=_scale_of_runs(weight, run),
        shift=run.bit_length() - 1,
        global_scale=0.0 if weight.global_scale is None else weight.global_scale.item(),
    )


def _scale_of_runs(q: QuantizedWeight, run: int) -> Tensor:
    """The scale of each run of numbers, contiguous: [N, K / run]."""
    N, K = q.shape
    block_n, block_k = get_format(q.format).block_of(q)
    if (block_n, block_k) == (1, run):
        return q.scale.contiguous()
    return expand_blocks(q.scale, (block_n, block_k // run), (N, K // run)).contiguous()
