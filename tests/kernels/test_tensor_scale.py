"""The scale that all rows share: to the bit that of the reference, for the rows that are used."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels import tensor_scale
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.tensor_scale import TensorScale
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def room():
    memory = torch.full((1 << 13,), 0x7F, dtype=torch.uint8, device=DEVICE)
    return TensorScale.allocate(empty=WorkspaceArena(memory).empty)


def numbers(R, K, dtype=torch.float32):
    g = torch.Generator().manual_seed(R + K)
    return (torch.randn(R, K, generator=g) * 3).to(dtype).to(DEVICE)


def want(x):
    return quantize_activations(x, "fp8_tensor").scale[0]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("R", "K"), [(1, 1), (1, 2100), (7, 96), (11, 24)])
def test_it_is_that_of_the_largest_magnitude_wherever_it_lies(monkeypatch, R, K, dtype):
    monkeypatch.setattr(tensor_scale, "_PROGRAMS", 4)
    x = numbers(R, K, dtype)
    assert torch.equal(room().find(x), want(x))
    for row, column in ((0, 0), (R - 1, K - 1), (R // 2, K // 2)):
        changed = x.clone()
        changed[row, column] = -40.0
        got = room().find(changed)
        assert torch.equal(got, want(changed))
        assert torch.equal(got.cpu(), torch.tensor([40.0]) / 448)


def test_rows_that_are_not_used_do_not_count():
    x = numbers(12, 256)
    for used, options in (
        ([0, 3, 4, 5, 9], {"row_of_pair": ints(4, -1, 0, 9, 3, 5, -1)}),
        ([0, 4, 5, 6, 8, 9], {"counts": ints(1, 3, 2), "capacity": 4}),
    ):
        poisoned = torch.full_like(x, torch.nan)
        poisoned[used] = x[used]
        got = room().find(poisoned, **options)
        assert torch.equal(got, want(x[used]))


@pytest.mark.parametrize(
    "options",
    [
        {"row_of_pair": ints(-1, -1)},
        {"row_of_pair": ints()},
        {"counts": ints(0, 0), "capacity": 2},
    ],
    ids=str,
)
def test_without_a_row_it_is_one(options):
    x = torch.full((4, 32), torch.nan, device=DEVICE)
    assert room().find(x, **options).tolist() == [1]


def test_of_zeros_it_is_one_and_of_the_smallest_number_too():
    x = torch.zeros(3, 64, device=DEVICE)
    x[1] = -0.0
    assert room().find(x).tolist() == [1]
    x[2, 5] = 2.0**-149  # divided by 448 it is 0
    assert room().find(x).tolist() == [1]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.parametrize(("poison", "scale"), [(torch.inf, torch.inf), (torch.nan, torch.nan)])
def test_inf_and_nan_stay_visible(poison, scale):
    for sign in (1, -1):
        x = numbers(5, 300)
        x[3, 7], x[1, 0] = sign * poison, 1e38
        assert torch.equal(room().find(x).isnan(), torch.tensor([scale != scale], device=DEVICE))
        assert not bool(room().find(x).isfinite().any())
