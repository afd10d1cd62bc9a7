"""Every kernel gives the bytes of the reference functions: all of them, of every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from moequant.formats import REGISTRY
from moequant.kernels.launch import INTERPRETED
from moequant.quantizers.launch import INFINITY, quantize_on_device

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

CASES = [
    pytest.param(
        format, dict(zip(format.options, values, strict=True)), id="-".join((name, *values))
    )
    for name, format in REGISTRY.items()
    for values in itertools.product(*format.options.values())
]
every_option = pytest.mark.parametrize(("format", "options"), CASES)


def quantize(format, weights, options):
    """On the device, and back here."""
    results, largest = quantize_on_device(format, [w.to(DEVICE) for w in weights], options)
    assert largest.max() < INFINITY
    return [q.to("cpu") for q in results]


def check(format, weights, options):
    """Every part of every weight is the reference's, byte for byte."""
    want = format.quantize_fused(weights, options, names=["w"] * len(weights))
    for q, wanted in zip(quantize(format, weights, options), want, strict=True):
        for key, part in wanted.tensors().items():
            found = q.tensors()[key]
            assert (found.dtype, found.shape) == (part.dtype, part.shape)
            same = as_bytes(found) == as_bytes(part)
            assert same.all(), f"{key}: {(~same).sum()} bytes differ, first {(~same).nonzero()[0]}"


def as_bytes(t):
    return t.reshape(-1).view(torch.uint8)


def patterns(dtype, order=1):
    """Every finite pattern of 16 bits, in the order of its odd multiples; [64, 1024]."""
    at = torch.arange(1 << 16, dtype=torch.int32) * order % (1 << 16)
    w = at.to(torch.int16).view(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    return torch.where(w.isfinite(), w, 0).to(dtype).reshape(64, 1024)


def randn(*shape, dtype=torch.bfloat16, scale=0.02, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to(dtype)


@every_option
@pytest.mark.parametrize("order", [1, 40503], ids=["in order", "mixed"])
def test_every_bf16_pattern_gives_the_bytes_of_the_reference(format, options, order):
    check(format, [patterns(torch.bfloat16, order)], options)


@every_option
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_other_dtypes_give_the_bytes_of_the_reference(format, options, dtype):
    w = randn(24, 512, dtype=dtype)
    w[:16] = patterns(dtype, 40503)[:16, :512]
    check(format, [w], options)


RAGGED = {
    "fp8_block": [(1, 1), (130, 257), (128, 100), (3, 640)],
    "nvfp4": [(1, 16), (3, 48), (33, 272)],
    "mxfp4": [(1, 32), (3, 96), (9, 992)],
    "w4a8": [(1, 128), (3, 384), (5, 1152), (2, 9088)],
}
"""Less than a program's share, and no multiple of it."""


@every_option
def test_shapes_that_fill_no_program_give_the_bytes_of_the_reference(format, options):
    for shape in RAGGED[format.name]:
        check(format, [randn(*shape)], options)


@every_option
def test_a_fused_set_of_two_shapes_gives_the_bytes_of_the_reference(format, options):
    K = 512
    gate, up = randn(24, K), randn(40, K, scale=0.3, seed=1)
    check(format, [gate, up], options)


@every_option
def test_a_batch_of_experts_gives_the_bytes_of_the_reference(format, options):
    w = randn(3, 24, 256)
    w[1] *= 50
    check(format, [w, 3 * w], options)


@every_option
def test_huge_tiny_and_zero_weights_give_the_bytes_of_the_reference(format, options):
    largest = torch.finfo(torch.bfloat16).max
    w = torch.zeros(8, 512)
    w[0, 0], w[0, 200], w[0, 500] = largest, -largest, 1.5 * 2.0**127
    w[1] = 2.0**-133  # the smallest of bfloat16, a denormal
    w[2, ::3] = -(2.0**-126)
    w[3] = -0.0
    w[4] = torch.linspace(-1, 1, 512) * 2.0**-120
    w[5] = torch.linspace(-1, 1, 512) * 2.0**100
    w[6, 5], w[6, 7] = 2.0**-130, 2.0**126
    w = w.bfloat16()
    check(format, [w], options)
    for row in range(len(w)):
        check(format, [w[row : row + 1].contiguous()], options)


@every_option
def test_weights_halfway_between_codes_give_the_bytes_of_the_reference(format, options):
    g = torch.Generator().manual_seed(0)
    halves = torch.randint(-18, 18, (64, 512), generator=g) / 4
    scales = (torch.randint(64, 128, (64, 32), generator=g) / 64).repeat_interleave(16, 1)
    check(format, [(halves * scales).bfloat16()], options)
    check(format, [halves.bfloat16()], options)


@every_option
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what then follows
def test_a_weight_that_is_not_finite_is_found_wherever_it_lies(format, options):
    places = [(0, 0), (1, 511), (2, 130)]
    values = [torch.nan, -torch.inf, torch.inf]
    for dtype, at, value in zip(DTYPES, places, values, strict=True):
        w = randn(3, 512, dtype=dtype)
        w[at] = value
        _, largest = quantize_on_device(format, [w.to(DEVICE)], options)
        assert largest.max() >= INFINITY


@every_option
def test_no_weights_give_no_codes(format, options):
    check(format, [torch.empty(0, 256, dtype=torch.bfloat16)], options)
