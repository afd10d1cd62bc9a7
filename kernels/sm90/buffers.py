"""What the kernels of a call on SM90 hand on to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.portable.portable_grouped_gemm import Rows
    from moequant.kernels.routing import SortedRouting
    from moequant.kernels.tensor_scale import TensorScale


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What the kernels of a call hand on, in a workspace.

    Attributes:
        routing: the sorted routing.
        x: float8_e4m3fn [rows, H], the tokens in the order of the experts; or [M, H], as they
            come, where the first GEMM gathers; None where hidden states are not quantized.
        x_scale: float32, of `x`: see `quantize_permute`.
        tokens: with a scale of all tokens, [M, H] as they come, before they are copied to `x`.
        scales: where calls compute it, that of all tokens and that of all rows of `act`.
        act: bfloat16 [rows, Ip], what the first GEMM leaves, unless it quantizes that itself.
        codes: float8_e4m3fn [rows, Ip], the same quantized; None where it is not.
        codes_scale: float32, of `codes`.
        y: bfloat16 [rows, H], the experts' results.
    """

    routing: SortedRouting
    x: Tensor | None
    x_scale: Tensor | None
    tokens: Rows | None
    scales: tuple[TensorScale, TensorScale] | None
    act: Tensor | None
    codes: Tensor | None
    codes_scale: Tensor | None
    y: Tensor

    @property
    def between(self) -> Tensor:
        """What the first GEMM writes."""
        written = self.codes if self.act is None else self.act
        assert written is not None
        return written
