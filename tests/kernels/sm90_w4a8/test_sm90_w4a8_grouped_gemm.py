"""What a kernel is compiled from, and that it fits; only tests on a GPU show that it compiles."""

from __future__ import annotations

from itertools import product

import pytest

from moequant.errors import MoequantError
from moequant.kernels.sm90_w4a8.sm90_w4a8_grouped_gemm import W4a8GemmConfig
from moequant.kernels.sm90_w4a8.tiling import ROWS, W4a8Tiling, tiling_for

SHARED_LIMIT = 227 * 1024


def tilings():
    """Every tiling there is."""
    for rows, split13, split2, pair, gather in product(
        ROWS, (1, 2, 4), (1, 2, 4), (False, True), (False, True)
    ):
        try:
            yield W4a8Tiling(rows=rows, split13=split13, split2=split2, pair=pair, gather=gather)
        except MoequantError:
            continue


def configs(tiling):
    """The two GEMMs of a layer with H = 7168 and I = 2048."""
    yield W4a8GemmConfig(
        act="silu",
        gated=True,
        gather=8 if tiling.gather else 0,
        routed=tiling.rows == 8,
        rows=tiling.rows,
        split=tiling.split13,
        pair=tiling.pair,
        K=7168,
        n_out=2048,
    )
    yield W4a8GemmConfig(
        act=None,
        gated=False,
        rows=tiling.rows,
        split=tiling.split2,
        pair=tiling.pair,
        K=2048,
        n_out=7168,
    )


def test_every_tiling_fits_and_has_stages_to_wait_for():
    for tiling in tilings():
        for config in configs(tiling):
            assert config.shared_bytes <= SHARED_LIMIT
            assert config.stages >= 5
            assert config.classes[-1] == tiling.rows
            # A class is the N of WGMMA, and the rows of a box of TMA.
            assert all(n % 8 == 0 and n <= 256 for n in config.classes)


def test_a_source_is_whole():
    config = next(configs(W4a8Tiling(rows=48)))
    source = config.source()
    assert "#include" not in source
    assert "//CLASSES" not in source
    assert "//WGMMA" not in source
    for n in config.classes:
        assert f"m64n{n}k32" in source
    assert "rows <= 16 ? 0 : rows <= 32 ? 1 : 2;" in source


@pytest.mark.parametrize(
    "choice",
    [
        {"rows": 24},
        {"rows": 48, "split2": 2},
        {"rows": 16, "split13": 3},
        {"rows": 64, "pair": True},
        {"rows": 128, "gather": True},
    ],
    ids=str,
)
def test_what_is_no_tiling_is_refused(choice):
    with pytest.raises(MoequantError, match="is no tiling: rows is one of"):
        W4a8Tiling(**choice)


@pytest.mark.parametrize(
    ("pairs", "shape", "want"),
    [
        (8, (128, 2048, 768), W4a8Tiling(rows=8, split13=2, split2=2)),
        (2, (8, 4096, 14336), W4a8Tiling(rows=8, split2=4)),
        (8, (256, 7168, 2048), W4a8Tiling(rows=8)),
        (1024, (128, 2048, 768), W4a8Tiling(rows=16)),
        (4096, (128, 2048, 768), W4a8Tiling(rows=48, gather=True)),
        (16384, (256, 7168, 2048), W4a8Tiling(rows=96)),
        (16384, (128, 2048, 768), W4a8Tiling(rows=128)),
        (65536, (128, 2048, 768), W4a8Tiling(rows=128, pair=True)),
    ],
)
def test_the_formula_chooses_what_was_fast(pairs, shape, want):
    experts, hidden, intermediate = shape
    got = tiling_for(
        pairs=pairs, experts=experts, hidden=hidden, intermediate=intermediate, sms=132
    )
    assert got == want
