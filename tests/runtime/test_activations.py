"""Quantized activations, against numpy and ml_dtypes alone and through whole layers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.runtime import FusedExperts
from moequant.runtime.activations import choice_of, quantize_activations
from moequant.verification.reference import Bounded, activation, exact, project

E4M3 = ml_dtypes.float8_e4m3fn
U = 2.0**-24

QUANTIZED = [name for name, fmt in CONVERTIBLE.items() if fmt.activations != "none"]

# By format, its own scheme; and one scale for all tokens.
SCHEMES_OF_LAYERS = [
    *((format, CONVERTIBLE[format].activations) for format in QUANTIZED),
    ("fp8_channel", "fp8_tensor"),
    ("fp8_tensor", "fp8_tensor"),
    ("mxfp4", "fp8_tensor"),
]

DYNAMIC = ["fp8_group128", "fp8_token", "none"]  # whose scales are computed, token by token


def groups_of(K, scheme):
    step = 128 if scheme == "fp8_group128" else K
    return [slice(k, min(k + step, K)) for k in range(0, K, step)]


def quantize_by_hand(x, scheme):
    """Codes and scales of float32 [M, K], a group at a time."""
    codes = np.empty(x.shape, E4M3)
    scales = np.empty((x.shape[0], len(groups_of(x.shape[1], scheme))), np.float32)
    for m, row in enumerate(x):
        for g, columns in enumerate(groups_of(x.shape[1], scheme)):
            group = x if scheme == "fp8_tensor" else row[columns]
            amax = np.float32(np.abs(group).max())
            scale = max(amax / np.float32(448), np.float32(2.0**-149)) if amax else np.float32(1)
            codes[m, columns] = np.clip(row[columns] / scale, -448, 448).astype(E4M3)
            scales[m, g] = scale
    return codes, scales


def dequantize_by_hand(x, scheme):
    """Code times scale, exact in float64."""
    codes, scales = quantize_by_hand(x, scheme)
    values = codes.astype(np.float64)
    for g, columns in enumerate(groups_of(x.shape[1], scheme)):
        values[:, columns] *= scales[:, g, None]
    return torch.from_numpy(values)


def requantize(h, scheme):
    """Quantize [R, K] of which float32 knows each value up to `h.error` only.

    Everything on the way is monotone: amax, division by a positive scale, rounding, times a scale.
    So the ends of the interval of each value give the ends of the interval of its result, and
    rounding of the float32 steps widens those by a relative 4 u. Most results are known to 1e-5;
    where the interval holds a rounding boundary, to a step.
    """
    value, error = h.value.numpy(), h.error.numpy()
    axis = None if scheme == "fp8_tensor" else 1
    result, low, high = np.empty_like(value), np.empty_like(value), np.empty_like(value)
    for columns in groups_of(value.shape[1], scheme):
        x, e = value[:, columns], error[:, columns]
        amax = np.abs(x).max(axis, keepdims=True)
        scales = [
            (np.abs(x) - e).max(axis, keepdims=True) / 448 * (1 - 4 * U),
            (np.abs(x) + e).max(axis, keepdims=True) / 448 * (1 + 4 * U),
        ]
        assert (scales[0] > 0).all()
        ratios = np.stack([(x + s * e) / scale for s in (-1, 1) for scale in scales])
        ratios = np.stack([ratios * (1 - 4 * U), ratios * (1 + 4 * U)])
        ends = [round_e4m3(ratios.min((0, 1))), round_e4m3(ratios.max((0, 1)))]
        products = np.stack([end * scale for end in ends for scale in scales])
        result[:, columns] = round_e4m3(x / (amax / 448)) * (amax / 448)
        low[:, columns], high[:, columns] = products.min(0), products.max(0)
    return Bounded(
        value=torch.from_numpy(result),
        error=torch.from_numpy(np.maximum(high - result, result - low)),
    )


def round_e4m3(x):
    return np.clip(x, -448, 448).astype(E4M3).astype(np.float64)


def activations(M, K, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((M, K)) * 2.0 ** rng.integers(-20, 20, (M, 1))
    return x.astype(np.float32)


@pytest.mark.parametrize("scheme", ["fp8_group128", "fp8_token", "fp8_tensor"])
@pytest.mark.parametrize("K", [1, 127, 128, 129, 300, 512])
def test_codes_and_scales_equal_those_computed_by_hand(scheme, K):
    x = activations(20, K)
    x[3] = 0
    x[4, : K // 2] = -0.0
    x[5] *= np.float32(2.0**-140)
    codes, scales = quantize_by_hand(x, scheme)
    q = quantize_activations(torch.from_numpy(x), scheme)
    assert q.qdata.dtype == torch.float8_e4m3fn
    assert np.array_equal(q.qdata.view(torch.uint8).numpy(), codes.view(np.uint8))
    assert np.array_equal(q.scale.numpy(), scales)
    assert torch.equal(q.dequantize(), dequantize_by_hand(x, scheme).float())


@pytest.mark.parametrize("scheme", ["fp8_group128", "fp8_token", "fp8_tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_quantized_by_its_values(scheme, dtype):
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, wide = quantize_activations(x, scheme), quantize_activations(x.float(), scheme)
    assert torch.equal(q.qdata.view(torch.uint8), wide.qdata.view(torch.uint8))
    assert torch.equal(q.scale, wide.scale)


@pytest.mark.parametrize("scheme", [s for s in DYNAMIC if s != "none"])
def test_every_float32_magnitude_keeps_a_finite_scale_and_the_largest_value_near(scheme):
    amax = torch.ldexp(torch.tensor(1.5), torch.arange(-149, 128).float())[:, None]
    q = quantize_activations(amax, scheme)
    assert (q.scale > 0).all()
    # amax / 448 is known to half a step of the smallest denormal, and a code to 2**-4 of itself.
    error = (q.dequantize().double() - amax.double()).abs()
    assert (error <= amax.double() / 16 + 448 * 2.0**-150).all()


@pytest.mark.parametrize("scheme", [s for s in DYNAMIC if s != "none"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_makes_its_group_nan_and_no_other(scheme, poison):
    x = torch.from_numpy(activations(3, 256))
    clean = quantize_activations(x, scheme).dequantize()
    x[1, 200] = poison
    result = quantize_activations(x, scheme).dequantize()
    group = slice(128, 256) if scheme == "fp8_group128" else slice(0, 256)
    assert result[1, group].isnan().all()
    result[1, group] = clean[1, group]
    assert torch.equal(result, clean)


def test_none_keeps_values_and_dtype():
    x = torch.randn(3, 5).bfloat16()
    q = quantize_activations(x, "none")
    assert q.qdata is x
    assert q.scale is None
    assert torch.equal(q.dequantize(), x.float())


@pytest.mark.parametrize("scheme", [*DYNAMIC, "fp8_tensor"])
def test_taking_rows_takes_their_scales(scheme):
    q = quantize_activations(torch.from_numpy(activations(6, 200)), scheme)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(q.take(rows).dequantize(), q.dequantize()[rows])


def emulate(layer, scheme):
    """The layer with activations quantized by hand, in float64: output and bound."""
    x = dequantize_by_hand(layer.hidden.float().numpy(), scheme)
    decoded = {n: dequantize(q).double() for n, q in layer.weights.projections().items()}
    M, T = layer.ids.shape
    output, error, magnitude = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(3))
    pairs = [(m, t, layer.ids[m, t]) for m in range(M) for t in range(T)]
    rows = []
    for m, _, e in pairs:
        row = exact(x[m : m + 1])
        gate, up = (project(row, decoded[name][e]) for name in ("gate", "up"))
        rows.append(activation("silu")(gate, up))
    h = requantize(
        Bounded(
            value=torch.cat([row.value for row in rows]),
            error=torch.cat([row.error for row in rows]),
        ),
        scheme,
    )
    for i, (m, t, e) in enumerate(pairs):
        w = layer.topk_weights[m, t].double()
        row = Bounded(value=h.value[i : i + 1], error=h.error[i : i + 1])
        y = project(row, decoded["down"][e])
        output[m] += w * y.value[0]
        error[m] += w * y.error[0]
        magnitude[m] += w * y.magnitude[0]
    # T products and T additions in float32.
    return output, error + (T + 1) * U * magnitude


@pytest.mark.parametrize(("format", "scheme"), SCHEMES_OF_LAYERS)
@pytest.mark.parametrize(("H", "I"), [(256, 128), (128, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_with_quantized_activations_equals_a_loop_written_by_hand(
    layers,
    format,
    scheme,
    H,
    I,
    dtype,
):
    layer = layers.make(format, H=H, I=I, dtype=dtype)
    output, bound = emulate(layer, scheme)
    own = scheme == get_format(format).activations
    module = FusedExperts(layer.weights, activations="format" if own else scheme)
    result = module(layer.hidden.float(), layer.topk_weights, layer.ids).double()
    assert ((result - output).abs() <= bound).all()
    # The bound is tight enough to tell: without quantization nearly everything lies outside.
    unquantized = module(
        layer.hidden.float(), layer.topk_weights, layer.ids, activations="none"
    ).double()
    assert ((unquantized - output).abs() > bound).double().mean() > 0.5


@pytest.mark.parametrize("format", [n for n, fmt in CONVERTIBLE.items() if fmt.ragged])
def test_layer_with_ragged_groups_equals_a_loop_written_by_hand(layers, format):
    layer = layers.make(format, H=200, I=150)
    output, bound = emulate(layer, get_format(format).activations)
    result = FusedExperts(layer.weights)(*layer.call).double()
    assert ((result - output).abs() <= bound).all()


def test_weight_only_formats_do_not_quantize_activations(layers, every_format):
    layer = layers.make(every_format)
    module = FusedExperts(layer.weights)
    same = torch.equal(module(*layer.call), module(*layer.call, activations="none"))
    assert same == (get_format(every_format).activations == "none")


@pytest.mark.parametrize("format", QUANTIZED)
def test_router_weight_on_input_comes_before_quantization(layers, format):
    layer = layers.make(format, T=1)
    layer.topk_weights.copy_(torch.linspace(0.1, 2, 13)[:, None])
    module = FusedExperts(layer.weights)
    result = module(*layer.call, apply_router_weight_on_input=True)
    weighted = layer.hidden * layer.topk_weights
    assert torch.equal(result, module(weighted, torch.ones(13, 1), layer.ids))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("fp8_row", r"unknown activation scheme 'fp8_row'; use one of: fp8_group128, fp8_token"),
        ("", "unknown activation scheme ''"),
        ("fp8_static", "needs static_scale; give it, or use fp8_token"),
    ],
)
def test_an_unknown_scheme_or_a_static_one_without_its_scale_is_refused(scheme, message):
    with pytest.raises(UnsupportedError, match=message):
        quantize_activations(torch.ones(2, 128), scheme)


def test_a_scheme_is_asked_for_by_its_name_or_as_that_of_the_weights():
    assert [choice_of(s) for s in ("none", "fp8_token", "fp8_group128", "nvfp4_static")] == [
        "none", "fp8_token", "format", "format"
    ]  # fmt: skip
