"""Which function rounds columns on a GPU, and that GPTQ gives the same codes with the kernel."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from moequant.formats import get_format, quantize
from moequant.formats.elements import E2M1, E4M3, INT4
from moequant.kernels import gptq_columns
from moequant.kernels.launch import INTERPRETED
from moequant.quantizers import gpu_columns
from moequant.quantizers.column_rounding import round_columns_in_torch
from moequant.quantizers.gptq import DAMPINGS, Gptq, unpacked_codes
from moequant.quantizers.gpu_columns import column_rounder

DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
K_OF_FORMAT = {"nvfp4": 80, "mxfp4": 96, "w4a8": 128, "fp8_block": 72}
"""More than one block of columns, no multiple of one where the format lets it."""


@pytest.fixture
def prepares(monkeypatch):
    """Forgets what was prepared before; the device seems to be one that Triton compiles for."""
    monkeypatch.setattr(gpu_columns, "_prepared", cache(gpu_columns._prepared.__wrapped__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def replace_kernel(monkeypatch, kernel):
    monkeypatch.setattr(gptq_columns, "round_columns", kernel)


@pytest.mark.parametrize("element", [E2M1, E4M3, INT4], ids=lambda e: e.name)
def test_the_kernel_is_chosen_when_it_gives_the_bits_of_the_reference(prepares, element):
    found = column_rounder(element, DEVICE)
    assert found.reason is None
    assert found.round_columns is not round_columns_in_torch


def test_a_kernel_that_gives_other_codes_is_not_used(prepares):
    def wrong(element, target, scale, codes, errors, feedback):
        # As many bits as the reference's, but for one code.
        round_columns_in_torch(E2M1, target, scale, codes, errors, feedback)
        codes[5, 3] ^= 1

    replace_kernel(prepares, wrong)
    found = column_rounder(E2M1, DEVICE)
    assert found.round_columns is round_columns_in_torch
    assert found.reason == f"it gives other codes than the reference on {DEVICE}"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("Failed to find C compiler.\nSpecify one"), "Failed to find C compiler."),
        (ImportError(), "ImportError"),
    ],
)
def test_a_kernel_that_does_not_compile_is_replaced_by_torch(prepares, error, says):
    def fails(*arguments):
        raise error

    replace_kernel(prepares, fails)
    found = column_rounder(E2M1, DEVICE)
    assert found.round_columns is round_columns_in_torch
    assert found.reason == f"it does not run on {DEVICE} ({says})"


def test_without_triton_or_on_an_old_gpu_torch_rounds(prepares):
    prepares.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    old = column_rounder(E2M1, DEVICE)
    assert old.reason == f"Triton needs compute capability 8.0, and {DEVICE} has 7.5"
    prepares.setattr(gpu_columns, "find_spec", lambda name: None)
    without = column_rounder(INT4, DEVICE)
    assert without.reason == "the package triton is not installed"
    assert {old.round_columns, without.round_columns} == {round_columns_in_torch}


def test_threads_that_come_together_find_it_prepared_once(prepares):
    calls, start = [], threading.Barrier(4)

    def kernel(*arguments):
        calls.append(arguments[0])
        round_columns_in_torch(E2M1, *arguments[1:])

    def run(_):
        start.wait()
        return column_rounder(E2M1, DEVICE)

    replace_kernel(prepares, kernel)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4)))
    assert calls == ["e2m1"]
    assert all(one is found[0] and one.reason is None for one in found)


def weight_and_hessian(format, *, dead=()):
    K = K_OF_FORMAT[format]
    g = torch.Generator().manual_seed(K)
    w = (torch.randn(5, K, generator=g) * 0.02).bfloat16()
    w[1], w[2, ::3], w[:, 9] = 0.0, -0.0, 0.0
    x = torch.randn(300, K, generator=g) @ torch.randn(K, K, generator=g) / K**0.5
    x[:, list(dead)] = 0.0
    H = x.T @ x / len(x)
    return w, torch.triu(H) + torch.triu(H, 1).T


def rounder(H, *, order):
    by = gpu_columns._round_columns
    return Gptq(H.to(DEVICE), activation_order=order, round_columns=by)


@pytest.mark.parametrize("format", K_OF_FORMAT)
@pytest.mark.parametrize("order", [False, True])
def test_gptq_gives_the_codes_of_the_cpu(format, order):
    w, H = weight_and_hessian(format, dead=(0, 7, 70))
    q = quantize(w, format)
    on_cpu = Gptq(H, activation_order=order)
    wanted = on_cpu.round(w, q)
    found = rounder(H, order=order).round(w.to(DEVICE), q.to(DEVICE))
    assert wanted.damping == found.damping == DAMPINGS[0]
    codes = found.weight.to("cpu")
    # Sums of 128 products are exact to 2**-46 of their terms, and none of these targets is as
    # near to a tie, so that the order of sums on a GPU does not matter either.
    assert torch.equal(unpacked_codes(codes), unpacked_codes(wanted.weight))
    assert on_cpu.may_have_rounded(w, q, codes)
    assert found.error == pytest.approx(wanted.error, rel=1e-9)


def test_a_larger_damping_is_taken_where_the_cpu_takes_it():
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        w, x, mixing = (torch.randn(rows, 32, generator=g) for rows in (1, 8, 32))
        x = x @ mixing * torch.randn(32, generator=g).exp()
        q, H = quantize(w, "mxfp4"), (x.T @ x).double()
        H = (H + H.T) / 2
        wanted = Gptq(H).round(w, q)
        if wanted.damping == DAMPINGS[1]:
            break
    assert wanted.damping == DAMPINGS[1], "of none of these"
    found = rounder(H, order=False).round(w.to(DEVICE), q.to(DEVICE))
    assert found.damping == wanted.damping
    assert torch.equal(found.weight.qdata.cpu(), wanted.weight.qdata)


def test_every_element_that_gptq_rounds_to_has_a_kernel():
    """`rounding = "gptq"` is an option of these formats."""
    from moequant.conversion.rounding import options_of_format
    from moequant.formats import CONVERTIBLE

    formats = [name for name in CONVERTIBLE if "rounding" in options_of_format(name)]
    assert {get_format(name).element for name in formats} <= {E2M1, E4M3, INT4}
    assert set(formats) == set(K_OF_FORMAT)
