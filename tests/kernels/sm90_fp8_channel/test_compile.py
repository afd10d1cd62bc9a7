"""Every kernel compiles for Hopper without spills, with all its products, which overlap."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")

from moequant.kernels.sm90.grouped_gemm import ACT_FNS
from moequant.kernels.sm90.tiling import Tiling
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import (
    Fp8ChannelGemmConfig,
    Fp8ChannelTilings,
)

H, I, T = 2880, 1536, 8


def gemms(tiling, *, act="silu", gated=True, **fields):
    """The first and the second GEMM of a tiling."""
    shared = {"rows": tiling.rows, "pair": tiling.pair, **fields}
    yield Fp8ChannelGemmConfig(
        act=act, gated=gated, gather=T if tiling.gather else 0, routed=tiling.rows == 8,
        split=tiling.split13, K=H, n_out=I, **shared,
    )  # fmt: skip
    yield Fp8ChannelGemmConfig(act=None, split=tiling.split2, K=I, n_out=H, **shared)


def every_epilogue():
    """With most registers: the largest tiles, gathered."""
    for rows, act, gated in product((96, 128), ACT_FNS, (True, False)):
        tiling = Tiling(rows=rows, pair=True, gather=True)
        # swiglustep and situ have a gate, relu2 mostly has none.
        yield from gemms(tiling, act=act, gated=gated, limited=True, bias=True, per_matrix=gated)


EVERY = list(dict.fromkeys(c for tiling in Fp8ChannelTilings().every() for c in gemms(tiling)))
EPILOGUES = list(dict.fromkeys(every_epilogue()))
FEW = [
    *gemms(Tiling(rows=8)),
    *gemms(Tiling(rows=128, pair=True, gather=True)),
    Fp8ChannelGemmConfig(act=None, K=128, n_out=256, rows=192, pair=False, split=1),
]


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param(FEW, id="few"),
        pytest.param(EVERY, id="every tiling", marks=pytest.mark.full),
        pytest.param(EPILOGUES, id="every function", marks=pytest.mark.full),
    ],
)
def test_kernels_compile_without_spills_and_their_products_overlap(compiles_well, configs):
    compiles_well(configs)
