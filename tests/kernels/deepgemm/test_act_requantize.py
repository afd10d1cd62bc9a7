from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import SILU, SITU, SWIGLUOAI, ActFn
from moequant.kernels.deepgemm.act_requantize import act_requantize
from moequant.kernels.launch import INTERPRETED
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROWS = 6


def gate_up(I, padded):
    """[ROWS, 2 * padded] bfloat16, NaN in the padding, which is never read."""
    g = torch.Generator().manual_seed(0)
    x = torch.full((ROWS, 2, padded), torch.nan, dtype=torch.bfloat16)
    x[:, :, :I] = (torch.randn(ROWS, 2, I, generator=g) * 2).bfloat16()
    return x.reshape(ROWS, 2 * padded)


def check(agree_in_fp8, x, I, function, rows, scale, used):
    gate, up = x.float().reshape(ROWS, 2, -1)[used, :, :I].unbind(1)
    want = quantize_activations(function(gate, up), "fp8_group128")
    agree_in_fp8(rows[used].cpu(), scale[used].cpu(), want)


@pytest.mark.parametrize(
    "function", [SILU, SWIGLUOAI, SITU, ActFn(name="swiglustep", limit=1.0)], ids=str
)
@pytest.mark.parametrize(("I", "padded"), [(256, 256), (80, 128)])
def test_rows_of_pairs_are_quantized_and_no_other_is_written(agree_in_fp8, I, padded, function):
    x = gate_up(I, padded).to(DEVICE)
    rows = torch.zeros(ROWS, I, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.full((-(-I // 128), 8), -1.0, device=DEVICE)
    row_of_pair = torch.tensor([4, -1, 0, 3], dtype=torch.int32, device=DEVICE)
    act_requantize(x, rows, scale, function, row_of_pair=row_of_pair)
    check(agree_in_fp8, x.cpu(), I, function, rows, scale[:, :ROWS].mT, [0, 3, 4])
    assert bool((scale[:, [1, 2, 5, 6, 7]] == -1).all())
    assert not rows.view(torch.uint8)[[1, 2, 5]].any()


def test_batches_are_quantized_up_to_their_counts(agree_in_fp8):
    x = gate_up(128, 128).to(DEVICE)
    rows = torch.zeros(2, 3, 128, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.full((2, 1, 3), -1.0, device=DEVICE)
    counts = torch.tensor([2, 3], dtype=torch.int32, device=DEVICE)
    act_requantize(x.reshape(2, 3, 256), rows, scale, SILU, counts=counts)
    flat = scale.mT.reshape(ROWS, 1)
    check(agree_in_fp8, x.cpu(), 128, SILU, rows.reshape(ROWS, 128), flat, [0, 1, 3, 4, 5])
    assert flat[2].tolist() == [-1]
