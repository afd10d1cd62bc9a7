"""The PTX of every variant, interpreted on a CPU, computes what the grouped GEMM is for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the extra moequant[cutlass]")

from moequant.kernels.cutlass.sm90_fp8_channel_grouped_gemm import compile_variant
from moequant.kernels.cutlass.variant import COLUMNS, THREADS, VARIANTS, WEIGHT_ROWS


def interpret(ptx, variant, *, w, x, w_scale, x_scale, bias, tiles, out, grid):
    """Run the kernel as `CutlassGroupedGemm` launches it."""
    E, N, K = w.shape
    program, memory = ptx.instructions(compile_variant(variant)[1]), ptx.Memory()
    count = torch.tensor([len(tiles)], dtype=torch.int32)
    pointers = [memory.place(t) for t in (w_scale, x_scale, bias, out, tiles, count)]
    maps = (
        ptx.TensorMap(w.view(E * N, K), (WEIGHT_ROWS, COLUMNS)),
        ptx.TensorMap(x, (variant.tile_rows, COLUMNS)),
    )
    parameters = {0: maps[0], 2: maps[1], **dict(enumerate([*pointers, N, K], 4))}
    for block in range(grid):
        ptx.Cta(
            program,
            parameters,
            memory,
            threads=THREADS,
            shared_bytes=variant.shared_bytes,
            block=block,
            grid=grid,
        ).run()


@pytest.mark.parametrize(
    "variant",
    [
        v if v.bias or v.tile_rows == 8 else pytest.param(v, marks=pytest.mark.full)
        for v in VARIANTS
    ],
    ids=str,
)
def test_it_multiplies_scales_and_writes_the_rows_of_tiles_alone(ptx_interpreter, variant):
    E, N, K, rows = 3, 208, 400, variant.tile_rows
    # Expert, first row, rows: a whole tile, part of one, one behind a gap, and the last row.
    tiles = [[0, 0, rows], [2, rows, 1], [1, rows + 3, rows - 1], [2, 2 * rows + 2, 3]]
    R = 2 * rows + 5
    g = torch.Generator().manual_seed(0)
    w = torch.randn(E, N, K, generator=g).to(torch.float8_e4m3fn)
    x = torch.randn(R, K, generator=g).to(torch.float8_e4m3fn)
    w_scale, x_scale = torch.rand(E, N, generator=g) + 0.5, torch.rand(R, generator=g) + 0.5
    live = torch.zeros(R, dtype=torch.bool)
    for _, first, used in tiles:
        live[first : first + used] = True
    bias = torch.randn(E, N, generator=g) * 10
    x.view(torch.uint8)[~live] = 0x7F  # NaN
    x_scale[~live] = torch.nan
    out = torch.full((R, N), torch.nan, dtype=torch.bfloat16)
    work = torch.tensor([[*tile, -1] for tile in tiles], dtype=torch.int32)
    interpret(
        ptx_interpreter,
        variant,
        w=w,
        x=x,
        w_scale=w_scale,
        x_scale=x_scale,
        bias=bias,
        tiles=work,
        out=out,
        grid=2,
    )
    assert bool(out[~live].isnan().all())
    for expert, first, used in tiles:
        at = slice(first, first + used)
        want = x[at].double() @ w[expert].double().mT * x_scale[at, None] * w_scale[expert]
        want += bias[expert] * variant.bias
        # A rounding to bfloat16, 2**-9, and 400 additions in float32 to sums of up to 64, 2**-19
        # each at random: sqrt(400) * 2e-6 = 4e-5, times scales of up to 2.25. Twice both.
        error = (out[at].double() - want).abs()
        assert bool((error <= 2**-8 * want.abs() + 2e-4).all())
