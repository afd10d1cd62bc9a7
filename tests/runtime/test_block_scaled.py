"""NVFP4, MXFP4 and MXFP8 activations, against groups computed by hand and bounds derived here."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime.activations import GROUPS, quantize_activations
from moequant.runtime.block_scaled import LARGEST_GLOBAL_SCALE, LEAST_GLOBAL_SCALE

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DYNAMIC = ["nvfp4", "mxfp4", "mxfp8"]
MX = ["mxfp4", "mxfp8"]
F32 = np.float32


def nearest_e2m1(x):
    """Code of a float, by search over all eight magnitudes; ties to the even code."""
    distance = np.abs(E2M1 - abs(x))
    code = min(range(8), key=lambda c: (distance[c], c % 2))
    return code | (8 if np.signbit(x) else 0)


def nvfp4_by_hand(x, s):
    """A group of 16 float32 under the global scale `s`: codes, scale."""
    wanted = (F32(1) / F32(s)) * (np.abs(x).max() * F32(1 / 6))
    scale = np.float32(np.minimum(wanted, F32(448)).astype(ml_dtypes.float8_e4m3fn))
    factor = F32(0) if scale == 0 else F32(1) / (scale * F32(s))
    return [nearest_e2m1(v) for v in x * factor], scale


def mx_by_hand(x, scheme):
    """A group of 32 float32: what it decodes to in float64 and the exponent of its scale."""
    amax = np.abs(x).max().astype(np.float64)
    if scheme == "mxfp8":
        wanted = np.ceil(np.log2(max(amax, 2.0**-149) / 448))
    else:  # to a power of two after rounding to two significant bits, ties up
        mantissa, exponent = np.frexp(amax)
        wanted = exponent - 1 + (mantissa * 2 >= 1.75) - 2
    exponent = int(np.clip(wanted, -127, 127)) if amax else -127
    units = x.astype(np.float64) * 2.0**-exponent
    if scheme == "mxfp4":
        codes = [nearest_e2m1(v) for v in units]
        decoded = [E2M1[c & 7] * (-1 if c & 8 else 1) for c in codes]
    else:
        decoded = np.clip(units, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.array(decoded) * 2.0**exponent, exponent


def rows(K, *, seed=0, spread=12):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, K)) * 2.0 ** rng.integers(-spread, spread, (24, 1))
    x *= 2.0 ** rng.integers(-4, 4, (24, K))
    x[3, :32] = 0
    x[4] = 0
    x[5, ::3] = -0.0
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("K", [32, 96, 512])
def test_nvfp4_equals_groups_computed_by_hand(K):
    x = rows(K).bfloat16().float()
    q = quantize_activations(x, "nvfp4")
    assert q.qdata.shape == (24, K // 2)
    assert (q.scale.dtype, q.scale.shape) == (torch.float8_e4m3fn, (24, K // 16))
    for m, row in enumerate(x.numpy()):
        s = max(np.abs(row).max() / F32(2688), F32(LEAST_GLOBAL_SCALE))
        assert q.global_scale[m, 0].item() == s
        for g in range(K // 16):
            codes, scale = nvfp4_by_hand(row[16 * g : 16 * g + 16], s)
            assert q.scale[m, g].float().item() == scale
            packed = [lo | hi << 4 for lo, hi in zip(codes[::2], codes[1::2], strict=True)]
            assert q.qdata[m, 8 * g : 8 * g + 8].tolist() == packed


@pytest.mark.parametrize("scheme", MX)
@pytest.mark.parametrize("K", [32, 96, 512])
def test_mxfp4_and_mxfp8_equal_groups_computed_by_hand(scheme, K):
    x = rows(K)
    q = quantize_activations(x, scheme)
    assert (q.scale.dtype, q.scale.shape) == (torch.float8_e8m0fnu, (24, K // 32))
    decoded = q.dequantize().double().numpy()
    for m, row in enumerate(x.numpy()):
        for g in range(K // 32):
            part = slice(32 * g, 32 * g + 32)
            wanted, exponent = mx_by_hand(row[part], scheme)
            assert q.scale.view(torch.uint8)[m, g] == exponent + 127
            assert np.array_equal(decoded[m, part], wanted)


@pytest.mark.parametrize(
    ("scheme", "amax", "exponent", "largest"),
    [
        ("mxfp4", 6.0, 0, 6.0),
        ("mxfp4", 6.9375, 0, 6.0),  # below 1.75 * 4: saturates
        ("mxfp4", 7.0, 1, 8.0),  # 3.5 in units of 2, a tie between 3 and 4
        ("mxfp4", 4.0, 0, 4.0),
        ("mxfp4", 3.5, 0, 4.0),
        ("mxfp4", 3.484375, -1, 3.0),
        ("mxfp8", 448.0, 0, 448.0),
        ("mxfp8", 450.0, 1, 448.0),
        ("mxfp8", 512.0, 1, 512.0),
        ("mxfp8", 447.9999694824, 0, 448.0),  # the float32 below 448
        ("mxfp8", 448.00003051758, 1, 448.0),  # the one above
    ],
)
def test_scales_at_the_limit_of_saturation(scheme, amax, exponent, largest):
    x = torch.zeros(1, 32)
    x[0, 7], x[0, 9] = -amax, amax / 4
    q = quantize_activations(x, scheme)
    assert q.scale.view(torch.uint8).item() == 127 + exponent
    assert q.dequantize()[0, 7] == -largest


def test_nvfp4_saturates_beyond_2688_global_scales_and_not_before():
    s = torch.tensor([2.0**-5])
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0], x[2, 0] = 2688 * 2.0**-5, 2690 * 2.0**-5, 1e30
    q = quantize_activations(x, "nvfp4_static", static_scale=s)
    assert q.scale.float().flatten().tolist() == [448] * 3
    assert q.dequantize()[:, 0].tolist() == [84.0] * 3


def test_nvfp4_scales_that_are_subnormal_or_round_to_zero():
    """amax / 6 in units of 2**-9, the least E4M3 number: 0.5 ties to 0, 1.5 to 2."""
    units = [0.25, 0.5, 0.53125, 1, 1.484375, 1.5, 7, 8]
    x = torch.zeros(len(units), 16)
    x[:, 3] = torch.tensor(units) * -6 * 2.0**-9
    q = quantize_activations(x, "nvfp4_static", static_scale=torch.ones(1))
    assert (q.scale.float().flatten() * 2.0**9).tolist() == [0, 0, 1, 1, 1, 2, 7, 8]
    # A group whose scale is 0 has only zeros, and they keep their signs.
    assert q.qdata[:2].unique().tolist() == [0, 0x80]
    # 1.484375 * 6 units saturate at 6; 3.1875 round to 3; 4.5 units of two, a tie, to 4.
    assert (q.dequantize()[:, 3] * -(2.0**9)).tolist() == [0, 0, 3, 6, 6, 8, 42, 48]


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_zeros_stay_zeros_of_their_sign(scheme):
    x = torch.zeros(2, 64)
    x[1] = -0.0
    q = quantize_activations(x, scheme)
    decoded = q.dequantize()
    assert torch.equal(decoded, x)
    assert torch.equal(decoded.signbit(), x.signbit())
    assert not q.scale.view(torch.uint8).any()


@pytest.mark.parametrize("scheme", [*DYNAMIC, "nvfp4_static"])
@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_makes_its_group_nan(scheme, poison):
    x = rows(128)
    options = {"static_scale": torch.tensor([0.5])} if scheme == "nvfp4_static" else {}
    clean = quantize_activations(x, scheme, **options).dequantize()
    x[7, 70] = poison
    q = quantize_activations(x, scheme, **options)
    result = q.dequantize()
    # A token's global scale is of all its groups.
    first = 0 if scheme == "nvfp4" else 70 // GROUPS[scheme] * GROUPS[scheme]
    last = 128 if scheme == "nvfp4" else first + GROUPS[scheme]
    assert result[7, first:last].isnan().all()
    result[7, first:last] = clean[7, first:last]
    assert torch.equal(result, clean)
    assert q.scale.float()[7].isnan().any()


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_every_float32_magnitude_is_decoded_near_or_saturates(scheme):
    x = torch.ldexp(torch.tensor(1.5), torch.arange(-149, 127).float())[:, None].repeat(1, 32)
    decoded = quantize_activations(x, scheme).dequantize().double()
    # NVFP4 and MXFP4 hold 1.5 * 2**n times an exact scale, to a fifth; below, the least steps.
    step = {"nvfp4": 2.0**-126 * 6, "mxfp4": 2.0**-129, "mxfp8": 2.0**-137}[scheme]
    assert ((decoded - x.double()).abs() <= x.double() / 5 + step).all()


def bound(x, q):
    """The error that a scheme can make, float64 [M, K].

    Codes are off by half a step of their element: E4M3's is 2**-4 of a magnitude, or 2**-10; that
    of E2M1 is at most a fifth of a magnitude from 1 on, and 1/4 below. Under the rule "even" a
    group's amax is below 7 scales and saturates at 6, less than a fifth of it. NVFP4's scale is
    rounded to E4M3, by up to 1/17, so amax is at most 6.375 scales; a scale below 2**-6 is off by
    up to 2**-10, so 6 * 2**-10 more is cut off. A few roundings of float32 move what is rounded.
    """
    scale = q.scale.double().repeat_interleave(GROUPS[q.scheme], 1)
    if q.scheme == "mxfp8":
        return torch.maximum(x.abs() / 16, scale * 2.0**-10)
    if q.scheme == "mxfp4":
        return torch.maximum(x.abs() / 5, scale / 4)
    near = torch.maximum(x.abs() / 5, scale / 4 * q.global_scale)
    return torch.maximum(near, 6 * 2.0**-10 * q.global_scale.double()) * (1 + 2.0**-20)


@pytest.mark.parametrize("scheme", DYNAMIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_error_exceeds_the_bound_of_the_elements(scheme, dtype):
    for seed in range(4):
        x = rows(512, seed=seed, spread=5).to(dtype)
        q = quantize_activations(x, scheme)
        error = (q.dequantize().double() - x.double()).abs()
        assert (error <= bound(x.double(), q)).all()


@pytest.mark.parametrize(
    ("scheme", "relative"), [("nvfp4", 0.0955), ("mxfp4", 0.1125), ("mxfp8", 0.0267)]
)
def test_relative_error_of_gaussian_activations(scheme, relative):
    """The figures in docs/runtime.md, in the Frobenius norm."""
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    error = (quantize_activations(x, scheme).dequantize() - x).norm() / x.norm()
    assert error == pytest.approx(relative, rel=0.01)


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_a_token_is_quantized_as_it_is_alone(scheme):
    x = rows(256)
    q = quantize_activations(x, scheme)
    order = torch.tensor([9, 0, 9, 23])
    taken = q.take(order)
    alone = quantize_activations(x[order], scheme)
    assert torch.equal(taken.qdata.view(torch.uint8), alone.qdata.view(torch.uint8))
    assert torch.equal(taken.scale.view(torch.uint8), alone.scale.view(torch.uint8))
    assert torch.equal(taken.dequantize(), q.dequantize()[order])


def test_the_limits_of_global_scales_leave_everything_finite():
    for s in (LEAST_GLOBAL_SCALE, LARGEST_GLOBAL_SCALE):
        x = torch.tensor([[0.0, 1.0, -2.0, 6.0]]).repeat(1, 4) * s
        q = quantize_activations(x, "nvfp4_static", static_scale=torch.tensor([s]))
        assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize(("scheme", "K"), [("nvfp4", 24), ("mxfp4", 48), ("mxfp8", 16)])
def test_columns_that_are_no_whole_groups_are_refused(scheme, K):
    with pytest.raises(UnsupportedError, match=f"{K} columns are not a multiple of .* {scheme}"):
        quantize_activations(torch.ones(2, K), scheme)


def test_a_static_global_scale_must_be_given():
    with pytest.raises(UnsupportedError, match=r"nvfp4_static needs static_scale.* or use nvfp4,"):
        quantize_activations(torch.ones(2, 32), "nvfp4_static")
