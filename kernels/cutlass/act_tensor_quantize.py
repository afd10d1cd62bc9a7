"""act_fn(gate, up) of a GEMM's output, quantized again with one scale of all rows.

gate_up  bfloat16       [rows, 2 * I], gate then up; [rows, I], up alone, where there is no gate
codes    float8_e4m3fn  [rows, I]
scale    float32        [rows], all the same

Four launches: the function, float32; two that find the scale; and the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.kernels.cutlass.act_rows import act_rows
from moequant.kernels.portable.portable_grouped_gemm import Rows
from moequant.kernels.portable.quantize import quantize_rows
from moequant.kernels.tensor_scale import TensorScale

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.act_fn import ActFn


@dataclass(frozen=True, kw_only=True)
class ActTensorQuantize:
    """Room for what lies between these launches.

    Attributes:
        act: float32 [rows, I].
        scale: of its rows in use.
    """

    act: Tensor
    scale: TensorScale

    @staticmethod
    def allocate(rows: int, I: int, *, empty: Callable[..., Tensor]) -> ActTensorQuantize:
        """Uninitialized; `empty` makes a tensor of a shape and `dtype`."""
        act = empty(rows, I, dtype=torch.float32)
        return ActTensorQuantize(act=act, scale=TensorScale.allocate(empty=empty))

    def __call__(
        self,
        gate_up: Tensor,
        codes: Tensor,
        scale: Tensor,
        act: ActFn,
        *,
        row_of_pair: Tensor,
    ) -> None:
        """Quantize act(gate, up) for the rows in use; others are not written.

        Args:
            gate_up: contiguous.
            codes: contiguous, written.
            scale: written.
            act: the function.
            row_of_pair: [pairs] int32, the rows in use, -1 for none.
        """
        act_rows(gate_up, self.act, act, row_of_pair)
        rows = Rows(scheme="fp8_token", qdata=codes.view(torch.uint8), scale=scale[:, None])
        static = self.scale.find(self.act, row_of_pair=row_of_pair)
        quantize_rows(self.act, rows, row_of_pair=row_of_pair, static=static)
