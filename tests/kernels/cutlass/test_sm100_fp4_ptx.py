"""The PTX of every variant for SM100, interpreted on a CPU, does what its description says.

`Fp4GroupedGemm` makes the launch: descriptors, pointers and sizes are those that a GPU would get.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the extra moequant[cutlass]")

from moequant.formats.elements import decode_e2m1, decode_e4m3, decode_e8m0, unpack_nibbles
from moequant.kernels.cutlass import sm100_fp4_launch as module
from moequant.kernels.cutlass.sm100_fp4_grouped_gemm import compile_variant
from moequant.kernels.cutlass.sm100_fp4_launch import Fp4GroupedGemm, scale_columns
from moequant.kernels.cutlass.sm100_fp4_variant import MXFP4, NVFP4, THREADS
from moequant.layouts.swizzle_128x4 import swizzle

E = 3
# Expert, first row, rows: a whole tile, the rest of its expert, and the last rows behind a gap.
TILES = ((0, 0, 128), (0, 128, 5), (2, 137, 3))
GAP, ROWS = slice(133, 137), 140
compiled = cache(compile_variant)


@pytest.fixture
def run(monkeypatch, ptx_interpreter):
    """run(variant, blocks, operands): the launch that the host makes, by `blocks` CTAs."""

    def interpret(variant, blocks, operands):
        memory = ptx_interpreter.Memory()
        places = {t.data_ptr(): memory.place(t) for t in operands.values() if t is not None}

        def launch(kernel, count, arguments):
            assert count == blocks
            # Descriptors and their shapes; addresses; sizes.
            passed = [*arguments[:8], *(places.get(a.value, 0) for a in arguments[8:13])]
            passed += [a.value for a in arguments[13:]]
            return lambda stream: execute(dict(enumerate(passed)), memory)

        def execute(parameters, memory):
            program = ptx_interpreter.instructions(compiled(variant).ptx)
            for block in range(blocks):
                ptx_interpreter.Cta(
                    program,
                    parameters,
                    memory,
                    threads=THREADS,
                    shared_bytes=variant.shared_bytes,
                    block=block,
                    grid=blocks,
                ).run()

        monkeypatch.setattr(module, "Launch", launch)
        monkeypatch.setattr(
            module, "tensor_map", lambda t, *, box: ptx_interpreter.TensorMap(t, box)
        )
        monkeypatch.setattr(module, "_kernel", lambda variant, device: None)
        monkeypatch.setattr(module, "_multiprocessors", lambda device: blocks)
        Fp4GroupedGemm(variant, **operands)(0)

    return interpret


def numbers(codes, scale, variant):
    """float64 [..., K] of codes [..., K / 2] and scales in bytes, by row and column."""
    if variant.e4m3_scales:
        scale = decode_e4m3(scale.view(torch.float8_e4m3fn))
    else:
        scale = decode_e8m0(scale.view(torch.float8_e8m0fnu))
    values = decode_e2m1(unpack_nibbles(codes)).double()
    return values * scale.double().repeat_interleave(variant.group, -1)


def operands_of(variant, parts, N, K):
    """Random operands whose sums float32 has exactly; what belongs to no row of a tile is NaN."""
    g = torch.Generator().manual_seed(1)
    groups = K // variant.group

    def codes(*shape):
        return torch.randint(256, (*shape, K // 2), dtype=torch.uint8, generator=g)

    def scales(*shape):
        """1 to 3.75 with every mantissa, or 1 / 8 to 4."""
        low, high = (0x38, 0x48) if variant.e4m3_scales else (124, 130)
        return torch.randint(low, high, (*shape, groups), generator=g).to(torch.uint8)

    x, x_scale, w, w_scale = codes(ROWS), scales(ROWS), codes(E, N), scales(E, N)
    swizzled = torch.full((8 * 128, scale_columns(K, variant.group)), 0xFF, dtype=torch.uint8)
    for i, (_, first, rows) in enumerate(TILES):
        own = torch.full((128, groups), 0xFF, dtype=torch.uint8)
        own[:rows] = x_scale[first : first + rows]
        swizzled[128 * i : 128 * i + 128] = swizzle(own)
    factor = alpha = None
    if variant.e4m3_scales:
        factor, alpha = torch.rand(ROWS, generator=g) + 0.5, torch.rand(E, parts, generator=g) + 0.5
        factor[GAP], alpha[1] = torch.nan, torch.nan
    tiles = torch.full((8, 4), -1, dtype=torch.int32)
    tiles[: len(TILES), :3] = torch.tensor(TILES)
    operands = {
        "x": x,
        "x_scale": swizzled,
        "x_factor": factor,
        "w": w,
        "w_scale": swizzle(w_scale),
        "alpha": alpha,
        "tiles": tiles,
        "tile_count": torch.tensor([len(TILES)], dtype=torch.int32),
        "out": torch.full((ROWS, N), torch.nan, dtype=torch.bfloat16),
    }
    return operands, x_scale, w_scale


@pytest.mark.parametrize(
    ("variant", "parts", "N", "K"),
    [(NVFP4, 2, 192, 352), (NVFP4, 1, 136, 1600), (MXFP4, 1, 200, 352), (MXFP4, 1, 128, 512)],
    ids=["nvfp4, gate and up", "nvfp4, steps that go round", "mxfp4", "mxfp4, whole tiles"],
)
def test_it_multiplies_scales_and_writes_the_rows_of_tiles_alone(run, variant, parts, N, K):
    operands, x_scale, w_scale = operands_of(variant, parts, N, K)
    run(variant, 2, operands)
    out = operands["out"]
    assert bool(out[GAP].isnan().all())
    for expert, first, rows in TILES:
        at = slice(first, first + rows)
        x = numbers(operands["x"][at], x_scale[at], variant)
        total = x @ numbers(operands["w"][expert], w_scale[expert], variant).T
        want = total.float()
        assert torch.equal(want.double(), total)
        if variant.e4m3_scales:
            alpha = operands["alpha"][expert].repeat_interleave(N // parts)
            want *= operands["x_factor"][at, None] * alpha
        assert torch.equal(out[at], want.bfloat16())
