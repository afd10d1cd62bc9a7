"""Which tiling a call of a size runs with."""

from __future__ import annotations

from dataclasses import dataclass

from moequant.errors import MoequantError

ROWS = (8, 16, 32, 48, 64, 96, 128)


@dataclass(frozen=True, kw_only=True)
class W4a8Tiling:
    """The tunable part of a call.

    Attributes:
        rows: most rows of a tile, one of ROWS; the smaller the fewer wasted, the larger the fewer
            times weights are read.
        split13: CTAs along K of the first GEMM: 1, 2 or 4; 1 above 32 rows.
        split2: of the second.
        pair: whether two CTAs share the weights that two tiles of an expert need; for splits of 1.
    """

    rows: int
    split13: int = 1
    split2: int = 1
    pair: bool = False
    gather: bool = False

    def __post_init__(self) -> None:
        splits = (1, 2, 4) if self.rows <= 32 else (1,)
        if (
            self.rows not in ROWS
            or not {self.split13, self.split2} <= set(splits)
            or (self.pair and self.rows < 96)
            or (self.gather and self.rows not in (48, 64))
        ):
            raise MoequantError(
                f"{self} is no tiling: rows is one of {ROWS}, a split 1, 2 or 4, and 1 above 32 "
                "rows, pairs are for 96 rows and more, gathering for 48 and 64"
            )


def tiling_for(*, pairs: int, experts: int, hidden: int, intermediate: int, sms: int) -> W4a8Tiling:
    """Rows that nearly all experts fit in under uniform routing; split-K while SMs are idle.

    The rules are from timings on an H200, see docs/kernels.md.

    Args:
        pairs: token-expert pairs of the call.
        experts: E here.
        hidden: H.
        intermediate: I.
        sms: multiprocessors of the GPU.
    """
    mean = pairs / experts
    likely = mean + 2 * mean**0.5
    rows = next((rows for rows in ROWS if likely <= rows), ROWS[-1])
    active = min(pairs, experts)

    def split(units: int) -> int:
        if rows > 16 or units > sms / 2:
            return 1
        return 2 if units > sms / 4 else 4

    return W4a8Tiling(
        rows=rows,
        split13=split(active * -(-intermediate // 128)),
        split2=split(active * -(-hidden // 256)),
        pair=mean - 2 * mean**0.5 > 192,
        gather=rows in (48, 64),
    )
