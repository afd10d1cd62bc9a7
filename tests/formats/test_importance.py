"""The weighted search for scales: its result is the optimum, and equal weights change nothing."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moequant.errors import RecipeError, StatisticsError
from moequant.formats import CONVERTIBLE, dequantize
from moequant.formats.blocks import expand_blocks
from moequant.formats.fp8_block import SEARCH_FACTORS as FP8_FACTORS
from moequant.formats.importance import importance_of
from moequant.formats.nvfp4 import SEARCH_STEPS, WEIGHTED_STEPS
from moequant.formats.w4a8 import WEIGHTED_FACTORS as W4A8_FACTORS
from moequant.formats.w4a8 import _scale_of, _step, join_scale, split_scale

N, K = 256, 512
WEIGHTED = [name for name, f in CONVERTIBLE.items() if "weighted" in f.options.get("search", ())]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# The search computes in float32. A number that is decoded and subtracted is off by at most 4
# roundings of 2**-24 of the weight, which changes a squared error by 2**-21 * error * weight, and
# their sum, by Cauchy-Schwarz, by 2**-21 * sqrt(errors * weights); squares, products and sums add
# at most 12 roundings. Two candidates may change places if both are off by that.
CLOSE = 1 + 2.0**-19


def weight(seed=0):
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def mean_square(seed=1):
    """Of magnitudes from 1 to 1e-6."""
    return torch.rand(K, generator=torch.Generator().manual_seed(seed)) ** 8 + 1e-6


def nearest_e2m1(x):
    """Errors of a rounded x; ties do not matter to them."""
    return E2M1[(x.abs()[..., None] - E2M1).abs().argmin(-1)] * x.sign()


def nearest_e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def weighted_errors(w, decoded, square, block):
    """Of each block, in float64: [N / bn, K / bk]."""
    error = (w.double() - decoded).square() * square.double()
    return error.reshape(N // block[0], block[0], K // block[1], block[1]).sum((1, 3))


def within(best, w, square, block):
    """What the errors of float32's choice are at most, given the least ones; see CLOSE."""
    energy = weighted_errors(w, 0.0, square, block)
    return best * CLOSE + 2.0**-20 * (best * energy).sqrt()


def best_e2m1(w, square, scales, group):
    """The least weighted error of each group over [candidates, N, K / group] scales, float64."""
    x = w.double().reshape(N, K // group, group)
    found = []
    for scale in scales.double():
        decoded = nearest_e2m1(x / scale[..., None]) * scale[..., None]
        found.append(weighted_errors(w, decoded.reshape(N, K), square, (1, group)))
    return torch.stack(found).amin(0)


@pytest.mark.parametrize("global_scale", CONVERTIBLE["nvfp4"].options["global_scale"])
def test_nvfp4_takes_the_weighted_optimum_of_its_candidates(global_scale):
    w, square, fmt = weight(), mean_square(), CONVERTIBLE["nvfp4"]
    q = fmt.quantize(w, {"search": "weighted", "global_scale": global_scale}, mean_square=square)
    start = fmt.quantize(w, {"global_scale": global_scale}).scale.view(torch.uint8).int()
    codes = [(start + step).clamp(1, 126).to(torch.uint8) for step in (0, *WEIGHTED_STEPS)]
    scales = torch.stack([code.view(torch.float8_e4m3fn).double() for code in codes])
    best = best_e2m1(w, square, scales * q.global_scale.double(), 16)
    found = weighted_errors(w, dequantize(q).double(), square, (1, 16))
    assert (found <= within(best, w, square, (1, 16))).all()
    plain = weighted_errors(w, dequantize(fmt.quantize(w)).double(), square, (1, 16))
    assert found.sum() < 0.9 * plain.sum()


def test_nvfp4_takes_smaller_scales_where_one_channel_counts_most():
    w, square, fmt = weight(), torch.ones(K), CONVERTIBLE["nvfp4"]
    square[5::16] = 1e6
    q = fmt.quantize(w, {"search": "weighted"}, mean_square=square)
    start = fmt.quantize(w).scale.view(torch.uint8).int()
    steps = set((q.scale.view(torch.uint8).int() - start).unique().tolist())
    assert steps == {0, *WEIGHTED_STEPS}
    codes = [(start + step).clamp(1, 126).to(torch.uint8) for step in (0, *SEARCH_STEPS)]
    scales = torch.stack([code.view(torch.float8_e4m3fn).double() for code in codes])
    fewer = best_e2m1(w, square, scales * q.global_scale.double(), 16)
    found = weighted_errors(w, dequantize(q).double(), square, (1, 16))
    assert (found <= within(fewer, w, square, (1, 16))).all()
    assert found.sum() < fewer.sum()


@pytest.mark.parametrize("rule", CONVERTIBLE["mxfp4"].options["scale_rule"])
def test_mxfp4_takes_the_better_of_its_rule_and_one_less(rule):
    w, square, fmt = weight(), mean_square(), CONVERTIBLE["mxfp4"]
    q = fmt.quantize(w, {"search": "weighted", "scale_rule": rule}, mean_square=square)
    start = fmt.quantize(w, {"scale_rule": "even" if rule == "mse" else rule}).scale.float()
    best = best_e2m1(w, square, torch.stack([start, start / 2]), 32)
    found = weighted_errors(w, dequantize(q).double(), square, (1, 32))
    assert (found <= within(best, w, square, (1, 32))).all()


def int4_errors(w, square, scales):
    """Weighted errors of each group under scales [N, K / 128], in float64."""
    wide = scales.double()[..., None]
    decoded = (w.double().reshape(N, K // 128, 128) / wide).round().clamp(-8, 7) * wide
    return weighted_errors(w, decoded.reshape(N, K), square, (1, 128))


def test_w4a8_takes_the_weighted_optimum_of_its_factors_and_of_the_scales_beside():
    w, square, fmt = weight(), mean_square(), CONVERTIBLE["w4a8"]
    q = fmt.quantize(w, {"search": "weighted"}, mean_square=square)
    step = _step(w.float().reshape(N, K // 128, 128))
    errors = torch.stack([int4_errors(w, square, step * factor) for factor in W4A8_FACTORS])
    factor = torch.tensor(W4A8_FACTORS)[errors.argmin(0)]
    clear = errors.sort(0).values[1] > errors.amin(0) * CLOSE
    # The scales of a row follow from its factors, which are known where all are clear.
    rows = clear.all(1)
    assert rows.double().mean() > 0.95
    group_scale, row_scale = split_scale(_scale_of(step * factor))
    code = group_scale.view(torch.uint8).int()
    found = weighted_errors(w, dequantize(q).double(), square, (1, 128))
    beside = [
        join_scale((code + more).clamp(1, 0x66).byte().view(torch.float8_e4m3fn), row_scale)
        for more in (0, -1, 1)
    ]
    nearest, *_ = errors = torch.stack([int4_errors(w, square, scale) for scale in beside])
    largest = step * factor == (step * factor).amax(1, keepdim=True)
    wanted = torch.where(largest, nearest, errors.amin(0))
    assert (found <= within(wanted, w, square, (1, 128)))[rows].all()
    assert torch.equal(q.scale[largest & rows[:, None]], beside[0][largest & rows[:, None]])
    assert found[rows].sum() < 0.99 * nearest[rows].sum()


def test_w4a8_takes_smaller_scales_where_one_channel_counts_most():
    w, square, fmt = weight(), torch.ones(K), CONVERTIBLE["w4a8"]
    square[5::128] = 1e6
    q = fmt.quantize(w, {"search": "weighted"}, mean_square=square)
    step = _step(w.float().reshape(N, K // 128, 128))
    ratio = q.scale.float() / step
    # The least factor, and at most half of that: below 2**-6, E4M3 has steps of 2**-9 alone.
    assert W4A8_FACTORS[-1] / 2 <= ratio.min() < 0.25
    fewer = torch.stack([int4_errors(w, square, step * n / 16) for n in range(13, 19)]).amin(0)
    found = weighted_errors(w, dequantize(q).double(), square, (1, 128))
    assert found.sum() < 0.7 * fewer.sum()


def test_w4a8_with_equal_mean_squares_is_no_worse_than_mse():
    w, fmt = weight(2), CONVERTIBLE["w4a8"]
    q = fmt.quantize(w, {"search": "weighted"}, mean_square=torch.full((K,), 0.37))
    mse = fmt.quantize(w, {"search": "mse"})
    error, of_mse = (
        weighted_errors(w, dequantize(one).double(), torch.ones(K), (1, 128)) for one in (q, mse)
    )
    # Scales are chosen by the error that they have when they are rounded.
    assert error.sum() < of_mse.sum()


@pytest.mark.parametrize("scale", CONVERTIBLE["fp8_block"].options["scale"])
def test_fp8_block_takes_the_weighted_optimum_of_its_factors(scale):
    w, square, fmt = weight().float(), mean_square(), CONVERTIBLE["fp8_block"]
    # Outliers in columns that hardly count, so large that all else is subnormal: clipping pays.
    w[::128, 5::128] = 1000
    square[5::128] = 1e-12
    options = {"search": "weighted", "scale": scale}
    q = fmt.quantize(w, options, mean_square=square)
    start = fmt.quantize(w, {"scale": scale}).scale
    errors = []
    for factor in FP8_FACTORS[scale]:
        wide = expand_blocks(start * factor, (128, 128), (N, K)).double()
        errors.append(weighted_errors(w, nearest_e4m3(w / wide) * wide, square, (128, 128)))
    best = torch.stack(errors).amin(0)
    found = weighted_errors(w, dequantize(q).double(), square, (128, 128))
    # Sums of 2**14 terms, in float32 one after the other down 128 rows: 2**-24 * (128 + 7 + 4).
    assert (found <= best * (1 + 2.0**-16)).all()
    assert not torch.equal(q.scale, start)


CASES = [
    (name, dict(zip(CONVERTIBLE[name].options, values, strict=True)))
    for name in WEIGHTED
    if name != "fp8_block"
    for values in product(*CONVERTIBLE[name].options.values())
    # The rule mse begins with the exponent of even.
    # The wide one of w4a8 tries other scales than mse.
    if "weighted" in values and not {"floor", "ceil", "wide"}.intersection(values)
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("value", [0.0, 1e-30, 0.37, 3e30])
def test_equal_mean_squares_give_the_bytes_of_mse(name, options, value):
    fmt, w = CONVERTIBLE[name], weight(2)
    unweighted = {"scale_rule": "mse"} if name == "mxfp4" else options | {"search": "mse"}
    q = fmt.quantize(w, options, mean_square=torch.full((K,), value))
    wanted = fmt.quantize(w, unweighted)
    assert torch.equal(q.qdata, wanted.qdata)
    assert torch.equal(q.scale.view(torch.uint8), wanted.scale.view(torch.uint8))


def test_importance_is_relative_and_all_zeros_count_alike():
    assert importance_of(torch.tensor([2.0, 0.0, 8.0]), 3).tolist() == [0.25, 0.0, 1.0]
    assert importance_of(torch.zeros(3), 3).tolist() == [1.0, 1.0, 1.0]
    assert importance_of(torch.zeros(0), 0).shape == (0,)


@pytest.mark.parametrize(
    ("square", "message"),
    [
        (torch.ones(4), r"w: mean squares of its inputs are torch.float32 \[4\], but must be"),
        (torch.ones(K).double(), r"w: .* torch.float64 \[512\], but must be torch.float32 \[512\]"),
        (torch.full((K,), -1.0), "w: a mean square of its inputs is -1.0, but must be finite"),
        (torch.full((K,), torch.nan), "w: a mean square of its inputs is nan"),
        (torch.full((K,), torch.inf), "w: a mean square of its inputs is inf"),
    ],
)
def test_invalid_mean_squares_are_refused(square, message):
    with pytest.raises(StatisticsError, match=message):
        CONVERTIBLE["nvfp4"].quantize(
            weight(), {"search": "weighted"}, name="w", mean_square=square
        )


@pytest.mark.parametrize("name", WEIGHTED)
def test_mean_squares_and_the_weighted_search_need_each_other(name):
    fmt = CONVERTIBLE[name]
    with pytest.raises(RecipeError, match="search = 'weighted' needs the mean squares"):
        fmt.quantize(weight(), {"search": "weighted"})
    with pytest.raises(RecipeError, match="only search = 'weighted' uses them"):
        fmt.quantize(weight(), mean_square=mean_square())
