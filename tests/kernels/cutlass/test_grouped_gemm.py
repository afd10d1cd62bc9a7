"""The grouped GEMM alone, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.cutlass.grouped_gemm import CutlassGroupedGemm
from moequant.kernels.cutlass.variant import VARIANTS
from moequant.kernels.launch import stream_of
from moequant.runtime.backends.capability import why_not_sm90
from moequant.runtime.backends.cutlass_fp8 import why_no_cute_dsl

WHY_NOT = why_not_sm90(torch.device("cuda", 0)) or why_no_cute_dsl()

# One rounding to bfloat16, and 2**-13 * 0.59 * sqrt(128) of the sums of 128 columns:
# tests/runtime/test_hopper_libraries.py derives both. Twice their sum.
ERROR = 2 * (2**-9 / 3**0.5 + 2**-13 * 0.59 * 128**0.5)


@pytest.mark.gpu
@pytest.mark.skipif(WHY_NOT is not None, reason=f"the grouped GEMM {WHY_NOT}")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_writes_the_rows_of_tiles_and_no_others(variant):
    E, N, K = 3, 336, 720
    rows = variant.tile_rows
    # Expert, first row, rows: whole tiles, parts of one, and rows of none in between.
    tiles = [[0, 0, rows], [0, rows, 1], [2, rows + 3, rows - 1], [2, 3 * rows + 2, 3]]
    R = 3 * rows + 9
    g = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(E, N, K, generator=g, device="cuda").to(torch.float8_e4m3fn)
    x = torch.randn(R, K, generator=g, device="cuda").to(torch.float8_e4m3fn)
    w_scale = torch.rand(E, N, generator=g, device="cuda") + 0.5
    x_scale = torch.rand(R, generator=g, device="cuda") + 0.5
    bias = torch.randn(E, N, generator=g, device="cuda") * 10 if variant.bias else None
    out = torch.full((R, N), torch.nan, dtype=torch.bfloat16, device="cuda")
    work = torch.tensor([[*tile, 0] for tile in tiles], dtype=torch.int32, device="cuda")
    count = torch.tensor([len(tiles)], dtype=torch.int32, device="cuda")
    live = torch.zeros(R, dtype=torch.bool, device="cuda")
    for _, first, used in tiles:
        live[first : first + used] = True
    x.view(torch.uint8)[~live] = 0x7F  # NaN
    gemm = CutlassGroupedGemm(
        variant,
        w=w,
        w_scale=w_scale,
        x=x,
        x_scale=x_scale,
        bias=bias,
        tiles=work,
        tile_count=count,
        out=out,
    )
    gemm(stream_of(out.device))
    assert bool(out[~live].isnan().all())
    for expert, first, used in tiles:
        at = slice(first, first + used)
        want = x[at].double() @ w[expert].double().mT * x_scale[at, None] * w_scale[expert]
        if bias is not None:
            want += bias[expert]
        assert (out[at].double() - want).norm() <= ERROR * want.norm()
