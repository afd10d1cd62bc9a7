from __future__ import annotations

import pytest
import torch

from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.portable.portable_grouped_gemm import Rows
from moequant.kernels.portable.quantize import quantize_rows
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def room(scheme, R, K):
    arena = WorkspaceArena(torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device=DEVICE))
    return Rows.allocate(scheme, R, K, dtype=torch.float32, empty=arena.empty)


def hidden(R, K, dtype=torch.float32):
    x = torch.randn(R, K, generator=torch.Generator().manual_seed(K)) * 3
    x[1, :128] = 0
    x[2] = 0
    return x.to(dtype).to(DEVICE)


def check(x, out, rows):
    # Equal to the last bit: both divide by 448 and by the scale, and round to nearest even.
    want = quantize_activations(x, out.scheme)
    assert torch.equal(out.qdata[rows], want.qdata.view(torch.uint8)[rows])
    assert torch.equal(out.scale[rows], want.scale[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("K", [96, 320, 2100])
@pytest.mark.parametrize("scheme", ["fp8_group128", "fp8_token"])
def test_codes_and_scales_are_those_of_the_reference(scheme, K, dtype):
    x, out = hidden(5, K, dtype), room(scheme, 5, K)
    quantize_rows(x, out)
    check(x, out, torch.arange(5))


@pytest.mark.parametrize("scheme", ["fp8_group128", "fp8_token"])
def test_rows_that_are_not_used_are_left_alone(scheme):
    x = hidden(12, 256)
    used = torch.tensor([0, 3, 4, 5, 9])
    for options in (
        {"row_of_pair": torch.tensor([4, -1, 0, 9, 3, 5, -1])},
        {"counts": torch.tensor([1, 3, 2]), "capacity": 4},
    ):
        out = room(scheme, 12, 256)
        kept = out.qdata.clone()
        options = {
            k: v.int().to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()
        }
        quantize_rows(x, out, **options)
        rows = used if "row_of_pair" in options else torch.tensor([0, 4, 5, 6, 8, 9])
        check(x, out, rows)
        others = [r for r in range(12) if r not in rows.tolist()]
        assert torch.equal(out.qdata[others], kept[others])


@pytest.mark.parametrize("scheme", ["fp8_group128", "fp8_token"])
def test_the_smallest_numbers_make_no_nan(scheme):
    # 2**-149 / 448 is 0, and 0 / 0 would be NaN.
    x = torch.zeros(1, 128, device=DEVICE)
    x[0, 5] = 2.0**-149
    out = room(scheme, 1, 128)
    quantize_rows(x, out)
    assert not bool(out.qdata.any())
    assert bool((out.scale == 1).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
def test_nan_and_inf_stay_visible():
    x = hidden(3, 256)
    x[0, 7], x[1, 200] = torch.nan, torch.inf
    for scheme in ("fp8_group128", "fp8_token"):
        out = room(scheme, 3, 256)
        quantize_rows(x, out)
        decoded = out.qdata.view(torch.float8_e4m3fn).float()
        value = decoded.reshape(3, -1, 128) * out.scale.reshape(3, -1, 1)
        assert value.isnan().any(2).any(1).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_static_scale_is_that_of_every_row(dtype):
    x, out = hidden(5, 320, dtype), room("fp8_token", 5, 320)
    x[3, 7] = 1e6  # saturates
    static = torch.tensor([0.0123], device=DEVICE)
    quantize_rows(
        x, out, row_of_pair=torch.tensor([0, 3, -1, 4], device=DEVICE).int(), static=static
    )
    want = quantize_activations(x, "fp8_static", static_scale=static)
    rows = [0, 3, 4]
    assert torch.equal(out.qdata[rows], want.qdata.view(torch.uint8)[rows])
    assert torch.equal(out.scale[rows], want.scale[rows])
    assert bool((out.qdata[[1, 2]] == 0x7F).all())
