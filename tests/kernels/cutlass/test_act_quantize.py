from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.kernels.cutlass import act_quantize as module
from moequant.kernels.cutlass.act_quantize import act_quantize
from moequant.kernels.launch import INTERPRETED
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROWS = 6


def gate_up(I, gated=True):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(ROWS, I * (1 + gated), generator=g) * 2).bfloat16()


def run(x, I, function, **options):
    codes = torch.zeros(ROWS, I, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.full((ROWS,), -1.0, device=DEVICE)
    options = {n: t.to(DEVICE) for n, t in options.items()}
    act_quantize(x.to(DEVICE), codes, scale, function, **options)
    return codes.cpu(), scale.cpu()


def check(agree_in_fp8, x, function, codes, scale, used):
    halves = x.float()[used].chunk(2 if function.gated else 1, 1)
    want = quantize_activations(
        function(None if len(halves) == 1 else halves[0], halves[-1]), "fp8_token"
    )
    agree_in_fp8(codes[used], scale[used, None], want)
    others = [row for row in range(ROWS) if row not in used]
    assert scale[others].tolist() == [-1] * len(others)
    assert not codes.view(torch.uint8)[others].any()


@pytest.mark.parametrize(
    "function",
    [SILU, SWIGLUOAI, SITU, RELU2, ActFn(name="swiglustep", limit=1.0), ActFn(name="gelu")],
    ids=str,
)
@pytest.mark.parametrize("block", [4096, 64])
def test_rows_of_pairs_are_quantized_and_no_other_is_written(
    agree_in_fp8, monkeypatch, function, block
):
    monkeypatch.setattr(module, "_BLOCK", block)  # 64: a row of 272 has five, and a part of one
    x = gate_up(272, function.gated)
    row_of_pair = torch.tensor([4, -1, 0, 3], dtype=torch.int32)
    got = run(x, 272, function, row_of_pair=row_of_pair)
    check(agree_in_fp8, x, function, *got, [0, 3, 4])


def test_batches_are_quantized_up_to_their_counts(agree_in_fp8):
    x = gate_up(64)
    got = run(x, 64, SILU, counts=torch.tensor([2, 3], dtype=torch.int32))
    check(agree_in_fp8, x, SILU, *got, [0, 1, 3, 4, 5])


def test_a_row_of_zeros_has_scale_one():
    x = torch.zeros(ROWS, 64, dtype=torch.bfloat16)
    codes, scale = run(x, 32, SILU, counts=torch.tensor([ROWS], dtype=torch.int32))
    assert scale.tolist() == [1] * ROWS
    assert not codes.view(torch.uint8).any()
