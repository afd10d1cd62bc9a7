"""Kernels compile for Hopper without spills, with all their products, which overlap.

Not those with a split of K, nor some of 160 rows without a gate: a few registers of their epilogues
spill.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from moequant.kernels.sm90.grouped_gemm import ACT_FNS
from moequant.kernels.sm90_w4a16.sm90_w4a16_fused import W4a16GemmConfig, W4a16Tilings

H, I, T = 2880, 1536, 8


def gemms(rows, *, format="nvfp4", act="silu", pair=False, **fields):
    """The first and the second GEMM."""
    shared = {"rows": rows, "pair": pair, "format": format, **fields}
    yield W4a16GemmConfig(
        act=act, gated=True, gather=T, routed=rows == 8, K=H, n_out=I, **shared
    )  # fmt: skip
    yield W4a16GemmConfig(act=None, K=I, n_out=H, **shared)


def every_tiling():
    for format in ("nvfp4", "mxfp4"):
        for rows in W4a16Tilings.rows:
            yield from gemms(rows, format=format)
        for rows in W4a16Tilings.pair_rows:
            yield from gemms(rows, format=format, pair=True)


def every_epilogue():
    """With most registers."""
    for act in ACT_FNS:
        for rows in W4a16Tilings.pair_rows:
            yield from gemms(rows, act=act, pair=True, limited=True, bias=True)
        yield from gemms(160, act=act, limited=True, bias=True)


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param([*gemms(8), *gemms(96, pair=True)], id="few"),
        pytest.param([*every_tiling()], id="every tiling", marks=pytest.mark.full),
        pytest.param([*every_epilogue()], id="every function", marks=pytest.mark.full),
    ],
)
def test_kernels_compile_without_spills_and_their_products_overlap(compiles_well, configs):
    compiles_well(configs)
