"""What kernels are given: a weight each for what is read and what is made or compared with.

A weight is plain numbers, or codes with scales. Whatever the blocks of its format, a kernel finds
the scale of the i-th number, counted through all rows, at `i >> shift`: of a format whose scales
do not lie that way, one for each row and power of two of columns is made, of at least 16 columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from moequant.formats import QuantizedWeight, get_format, scale_block
from moequant.quantizers.vectors import F32, I32, I64, PTR, Function

if TYPE_CHECKING:
    from torch import Tensor

LEAST_RUN = 16
"""Numbers that share a scale where kernels read codes."""
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
}
"""The parameters of every kernel: two operands, the extents N and K between them."""


def new_kernel() -> Function:
    """A kernel of which nothing is written yet; what it returns says each."""
    return Function("kernel", PARAMETERS, I32)


class Operand(NamedTuple):
    """A weight in memory.

    Attributes:
        data: numbers or codes, contiguous.
        scale: as many as `shift` says, contiguous; None of plain numbers.
        shift: logarithm of how many numbers share one.
        global_scale: multiplier of all, 0 where the format has none.
    """

    data: Tensor
    scale: Tensor | None = None
    shift: int = 0
    global_scale: float = 0.0

    def arguments(self) -> tuple[int, int, int, float]:
        """In the order of PARAMETERS; addresses are good as long as this object is."""
        scale = 0 if self.scale is None else self.scale.data_ptr()
        return self.data.data_ptr(), scale, self.shift, self.global_scale


def run_of(q: QuantizedWeight) -> int:
    """How many numbers of a weight [N, K], one after the other, surely share a scale.

    A power of two up to 128; 0 of a weight without numbers.
    """
    return math.gcd(q.shape[1], scale_block(q)[1], _LONGEST_RUN) if q.shape.numel() else 0


def operand_of(weight: Tensor | QuantizedWeight) -> Operand:
    """A weight [N, K], as kernels read it; of codes `run_of` is at least LEAST_RUN."""
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
    block_n, block_k = scale_block(q)
    if (block_n, block_k) == (1, run):
        return q.scale.contiguous()
    of_runs = _repeated(q.scale, block_k // run, 1)[:, : K // run]
    return _repeated(of_runs, block_n, 0)[:N].contiguous()


def _repeated(scale: Tensor, times: int, axis: int) -> Tensor:
    """As `repeat_interleave`, in a third of the time."""
    shape = [-1, -1]
    shape.insert(axis + 1, times)
    return scale.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)
