"""Kernels compile for Hopper without spills, with all their products, which overlap.

Not those with a split of K, of 128 rows that are gathered, nor of 176 rows with biases: 8 to 108
bytes of their epilogues spill.
"""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")

from moequant.kernels.sm90.grouped_gemm import ACT_FNS
from moequant.kernels.sm90.tiling import Tiling
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import (
    Mxfp4Fp8Tilings,
    W4a8GemmConfig,
    W4a8Tilings,
)

H, I, T = 2816, 1536, 8
FAMILIES = {"w4a8": W4a8Tilings(), "mxfp4": Mxfp4Fp8Tilings()}


def gemms(format, tiling, *, act="silu", gated=True, **fields):
    """The first and the second GEMM of a tiling."""
    shared = {"rows": tiling.rows, "pair": tiling.pair, "format": format, **fields}
    yield W4a8GemmConfig(
        act=act, gated=gated, gather=T if tiling.gather else 0, routed=tiling.rows == 8,
        K=H, n_out=I, **shared,
    )  # fmt: skip
    yield W4a8GemmConfig(act=None, K=I, n_out=H, **shared)


def spills(tiling):
    return tiling.split13 > 1 or (tiling.rows == 128 and tiling.gather)


def every_tiling():
    for format, family in FAMILIES.items():
        for tiling in family.every():
            if not spills(tiling):
                yield from gemms(format, tiling)


def every_epilogue():
    """With most registers."""
    for format, act, gated in product(FAMILIES, ACT_FNS, (True, False)):
        tiling = Tiling(rows=128, pair=True)
        yield from gemms(format, tiling, act=act, gated=gated, limited=True, bias=True)


FEW = [
    next(gemms("w4a8", Tiling(rows=96, pair=True, gather=True))),
    next(gemms("mxfp4", Tiling(rows=64, gather=True))),
    next(gemms("mxfp4", Tiling(rows=176))),
]


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param(FEW, id="few"),
        pytest.param([*every_tiling()], id="every tiling", marks=pytest.mark.full),
        pytest.param([*every_epilogue()], id="every function", marks=pytest.mark.full),
    ],
)
def test_kernels_compile_without_spills_and_their_products_overlap(compiles_well, configs):
    compiles_well(list(dict.fromkeys(configs)))
