"""How weights lie in memory: what a kernel must know to decode them.

    code                               multiplied by
    bfloat16, float16, float32         a float32 of the expert (1)
    E4M3                               a float32 of the expert, of the row, or of 128 rows and
                                       128 columns, or an E8M0 of 32 columns
    E2M1                               an E8M0 of 32 columns, or an E4M3 of 16 columns and a
                                       float32 of the expert
    INT4                               a bfloat16 of 128 columns

A code of at most 8 bits, and one times its scale of 8 bits, is exact in bfloat16; a float16 is a
sum of two bfloat16, a float32 of three. Scales of 128 columns multiply the float32 sum over these,
those of a row or an expert the whole sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.act_fn import ActFn

ELEMENTS = ("e2m1", "e4m3", "int4", "bf16", "fp16", "fp32")
"""What the kernels decode."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One of the matrices of E experts.

    Each expert's part of a tensor is contiguous; the stride between experts may be larger, as
    that of gate is in a tensor that holds gate over up.

    Attributes:
        element: what a code is, one of ELEMENTS.
        qdata: [E, N, K] bfloat16, float16 or float32, or uint8 codes [E, N, K] or [E, N, K / 2],
            the even column in the low nibble.
        scale: [E, ceil(N / scale_rows), ceil(K / scale_columns)], bytes where it is of 8 bits; any
            tensor where scale_columns is 0.
        scale_rows: rows that share a scale.
        scale_columns: columns that do.
        end: float32 [E] or [E, N], the scale of the whole sum, or None.
        bias: float32 or bfloat16 [E, N], or None.
    """

    element: str
    qdata: Tensor
    scale: Tensor
    scale_rows: int
    scale_columns: int
    end: Tensor | None
    bias: Tensor | None

    @property
    def experts(self) -> int:
        """E."""
        return self.qdata.shape[0]

    @property
    def rows(self) -> int:
        """N."""
        return self.qdata.shape[1]

    @property
    def columns(self) -> int:
        """K."""
        return self.qdata.shape[2] * self.codes_per_byte

    @property
    def codes_per_byte(self) -> int:
        """2 for elements of four bits."""
        return 2 if self.element in ("e2m1", "int4") else 1

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """From one expert to the next: rows of qdata and of scale, elements of end and of bias."""
        return (
            self.qdata.stride(0) // self.qdata.shape[2],
            self.scale.stride(0) // self.scale.shape[-1],
            0 if self.end is None else self.end.stride(0),
            0 if self.bias is None else self.bias.stride(0),
        )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The matrices of E experts.

    Attributes:
        gate: [E, I, H], or None where there is none.
        up: [E, I, H].
        down: [E, H, I].
        act_fn: the function between them.
        activations: how both GEMMs are fed: "none", "fp8_group128" or "fp8_token".
        up_static: with "fp8_token", float32 [1], the scale of all tokens that gate and up are fed;
            None, and each has its own.
        down_static: likewise of what down is fed.
        tensor_scale: with "fp8_token", whether calls compute such scales, of the largest magnitude
            of all tokens, and of all rows that down is fed.
    """

    gate: Projection | None
    up: Projection
    down: Projection
    act_fn: ActFn
    activations: str
    up_static: Tensor | None = None
    down_static: Tensor | None = None
    tensor_scale: bool = False

    @property
    def experts(self) -> int:
        """E."""
        return self.up.experts

    @property
    def hidden(self) -> int:
        """H."""
        return self.up.columns

    @property
    def intermediate(self) -> int:
        """I."""
        return self.up.rows
