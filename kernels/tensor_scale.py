"""The FP8 scale that all rows of activations share, found on the device in two launches.

The first leaves the largest magnitude of each program's rows, the second that of all, and its
scale: amax / 448, and 1 where that is 0. Magnitudes are compared as the bits of float32, which are
in the order of the numbers, with Inf and NaN above all: the result depends on no order of programs,
and is NaN where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moequant.kernels.fp8_codes import scale_of
from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_PROGRAMS = 1024
"""Of the first launch at most: several on each SM, and all of their results in one program."""
_BLOCK = 2048


@dataclass(frozen=True, kw_only=True)
class TensorScale:
    """Room for a scale.

    Attributes:
        value: float32 [1], the scale.
        largest: int32 [1024], bits of the largest magnitude that each program has seen.
    """

    value: Tensor
    largest: Tensor

    @staticmethod
    def allocate(*, empty: Callable[..., Tensor]) -> TensorScale:
        """Uninitialized; `empty` makes a tensor of a shape and `dtype`."""
        return TensorScale(
            value=empty(1, dtype=torch.float32), largest=empty(_PROGRAMS, dtype=torch.int32)
        )

    def find(
        self,
        x: Tensor,
        *,
        row_of_pair: Tensor | None = None,
        counts: Tensor | None = None,
        capacity: int = 0,
    ) -> Tensor:
        """Write `value` for every row of `x`, or for those that are used; 1 if there are none.

        Args:
            x: [R, K] contiguous, bfloat16, float16 or float32.
            row_of_pair: [pairs] int32; the rows that are used, -1 for none.
            counts: [E] int32; rows e * capacity to e * capacity + counts[e] are used.
            capacity: see `counts`.

        Returns:
            `value`.
        """
        assert row_of_pair is None or counts is None
        rows = x.shape[0] if row_of_pair is None else row_of_pair.shape[0]
        programs = min(rows, _PROGRAMS)
        overlap = overlaps_launches(x.device)
        if programs:
            launch(
                find_largest,
                (programs,),
                x,
                self.largest,
                x if row_of_pair is None else row_of_pair,
                x if counts is None else counts,
                rows,
                triton.cdiv(rows, programs),
                capacity,
                K=x.shape[1],
                SORTED=row_of_pair is not None,
                BATCHED=counts is not None,
                BLOCK=min(_BLOCK, triton.next_power_of_2(x.shape[1])),
                OVERLAP=overlap,
                num_warps=8,
                overlap=overlap,
            )
        launch(
            find_scale,
            (1,),
            self.largest,
            self.value,
            programs,
            PROGRAMS=_PROGRAMS,
            OVERLAP=overlap,
            num_warps=4,
            overlap=overlap,
        )
        return self.value


@triton.jit(do_not_specialize=["rows", "rounds", "capacity"])
def find_largest(
    x,
    largest,
    row_of_pair,
    counts,
    rows,
    rounds,
    capacity,
    K: tl.constexpr,
    SORTED: tl.constexpr,
    BATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: a row in each round, of those that are used."""
    wait_for_inputs(OVERLAP)
    bits = tl.zeros([BLOCK], tl.int32)
    for i in range(rounds):
        row = tl.program_id(0).to(tl.int64) + i * tl.num_programs(0)
        used = row < rows
        if SORTED:
            row = tl.load(row_of_pair + row, mask=used, other=-1).to(tl.int64)
            used = row >= 0
        if BATCHED:
            used &= row % capacity < tl.load(counts + row // capacity, mask=used, other=0)
        columns = tl.where(used, K, 0)
        for first in range(0, K, BLOCK):
            col = first + tl.arange(0, BLOCK)
            value = tl.load(x + row * K + col, mask=col < columns, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(largest + tl.program_id(0), tl.max(bits, 0))


@triton.jit(do_not_specialize=["programs"])
def find_scale(
    largest,
    scale,
    programs,
    PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The one program: the scale of the first `programs` magnitudes."""
    wait_for_inputs(OVERLAP)
    i = tl.arange(0, PROGRAMS)
    bits = tl.load(largest + i, mask=i < programs, other=0)
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(scale, scale_of(amax))
