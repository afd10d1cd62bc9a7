"""GPTQ against its textbook form, and that it never does worse than rounding to nearest."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moequant.errors import NonFiniteError, StatisticsError, UnsupportedError
from moequant.formats import dequantize, get_format, quantize
from moequant.formats.elements import pack_nibbles
from moequant.formats.w4a8 import join_scale, split_scale
from moequant.quantizers import NativeQuantizer
from moequant.quantizers.column_rounding import COLUMNS, round_columns_in_torch
from moequant.quantizers.gptq import DAMPINGS, Gptq, unpacked_codes

FORMATS = ("nvfp4", "mxfp4", "w4a8", "fp8_block")
every_format = pytest.mark.parametrize("format", FORMATS)
in_both_orders = pytest.mark.parametrize("activation_order", [False, True])


def weight(N, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((N, K), generator=generator) * 0.02).bfloat16()


def hessian(K, tokens, seed=0, dead=()):
    """The mean of x xt over correlated inputs with some large channels, float32."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn((K, K), generator=generator, dtype=torch.float64) / K**0.5
    size = torch.randn(K, generator=generator, dtype=torch.float64).exp()
    x = torch.randn((tokens, K), generator=generator, dtype=torch.float64) @ mixing * size
    x[:, list(dead)] = 0
    H = (x.T @ x / max(tokens, 1)).float()
    return torch.triu(H) + torch.triu(H, 1).T


def weighted_error(w, q, H):
    E = w.double() - dequantize(q).double()
    return float((E @ H.double() * E).sum())


def column_by_column(w, q, H, *, activation_order, damping):
    """GPTQ as its paper writes it, without blocks: decoded weights [N, K] float64.

    Column after column, with the upper Cholesky factor U of the inverse of H:
        error = (w[:, k] - rounded) / U[k, k];  w[:, k + 1:] -= error U[k, k + 1:]
    """
    H = H.double().clone()
    H += torch.eye(len(H)) * damping * H.diagonal().mean()
    order = torch.arange(len(H))
    if activation_order:
        order = H.diagonal().argsort(descending=True, stable=True)
    U = torch.linalg.cholesky(torch.linalg.inv(H[order][:, order]), upper=True)
    element, (block_n, block_k) = get_format(q.format).element, get_format(q.format).block
    global_scale = 1.0 if q.global_scale is None else float(q.global_scale)
    left = w.double()[:, order]
    result = torch.zeros(w.shape, dtype=torch.float64)
    rows = torch.arange(w.shape[0]) // block_n
    for k, column in enumerate(order.tolist()):
        scale = q.scale[rows, column // block_k].double() * global_scale
        codes = element.encode((left[:, k] / scale).float())
        rounded = element.decode(codes).double() * scale
        result[:, column] = rounded
        error = (left[:, k] - rounded) / U[k, k]
        left[:, k + 1 :] -= torch.outer(error, U[k, k + 1 :])
    return result


@every_format
@in_both_orders
def test_equals_the_textbook_form(format, activation_order):
    w, H = weight(24, 256), hessian(256, 4000)
    q = quantize(w, format)
    found = Gptq(H, activation_order=activation_order).round(w, q)
    expected = column_by_column(w, q, H, activation_order=activation_order, damping=DAMPINGS[0])
    assert found.damping == DAMPINGS[0]
    # Both are float64 sums of the same numbers in another order. Codes differ only where a sum is
    # within about 1e-12 of a tie, which none of these 6144 random ones is.
    assert torch.equal(dequantize(found.weight).double(), expected)


@every_format
@in_both_orders
@pytest.mark.parametrize("rows", [1, 37, 64])
def test_the_native_kernel_rounds_as_the_reference(format, activation_order, rows):
    # K is no multiple of the columns of a block, N none of the rows that are rounded at a time.
    w, H = weight(rows, 384 - 16 * (format == "nvfp4")), hessian(384, 1000)
    H = H[: w.shape[1], : w.shape[1]].contiguous()
    w[:, 3] = 0.0
    q = quantize(w, format)
    native = NativeQuantizer().round_columns
    found = [
        Gptq(H, activation_order=activation_order, round_columns=by).round(w, q)
        for by in (None, native)
    ]
    codes = [unpacked_codes(one.weight) for one in found]
    assert torch.equal(*codes)
    assert found[0].error == found[1].error < found[0].error_before


def test_its_memory_is_freed_without_the_collector():
    gptq = Gptq(hessian(128, 500))
    gptq.round(weight(8, 128), quantize(weight(8, 128), "mxfp4"))
    gone = weakref.ref(gptq)
    gc.disable()
    try:
        del gptq
        assert gone() is None
    finally:
        gc.enable()


@every_format
@in_both_orders
def test_what_was_rounded_is_recognized_and_nothing_else(format, activation_order):
    w, H = weight(24, 256), hessian(256, 4000)
    q = quantize(w, format)
    gptq = Gptq(H, activation_order=activation_order)
    found = gptq.round(w, q).weight
    assert gptq.may_have_rounded(w, q, found)
    assert not gptq.may_have_rounded(w, q, q)
    assert not Gptq(
        H * torch.linspace(0.5, 1, 256).outer(torch.linspace(0.5, 1, 256))
    ).may_have_rounded(w, q, found)
    for position in (0, 1000, found.qdata.numel() - 1):
        wrong = found.qdata.clone()
        wrong.view(torch.uint8).view(-1)[position] ^= 1
        assert not gptq.may_have_rounded(w, q, replace(found, qdata=wrong))


def test_both_sides_of_a_tie_are_recognized():
    # Columns that do not depend on each other, so that targets are the weights. 2.5 is a tie.
    w = torch.full((2, 32), 6.0)
    w[:, 1] = torch.tensor([2.5, 2.5 + 2.0**-12])
    H = torch.eye(32)
    H[2, 3] = H[3, 2] = 0.5
    w[:, 2:4] = torch.tensor([2.4, 2.4])
    q = quantize(w.bfloat16().float(), "mxfp4")
    gptq, codes = Gptq(H), unpacked_codes(quantize(w, "mxfp4"))
    rounded = gptq.round(w, q)
    assert rounded.damping is not None
    codes = unpacked_codes(rounded.weight)
    for row, other, right in ((0, 5, True), (0, 4, True), (1, 5, True), (1, 4, False)):
        tied = codes.clone()
        tied[row, 1] = other  # 2 is code 4, 3 is code 5
        found = replace(rounded.weight, qdata=pack_nibbles(tied))
        assert gptq.may_have_rounded(w, q, found) is right


@every_format
@in_both_orders
def test_correlated_inputs_gain(format, activation_order):
    w, H = weight(64, 256), hessian(256, 4000)
    q = quantize(w, format)
    found = Gptq(H, activation_order=activation_order).round(w, q)
    assert found.error == weighted_error(w, found.weight, H)
    assert found.error_before == weighted_error(w, q, H)
    assert found.error < 0.9 * found.error_before


@every_format
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 3, 100, 1000]),
    dead=st.sets(st.integers(0, 127), max_size=20),
    seed=st.integers(0, 2**16),
    weight_scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e30]),
    input_scale=st.sampled_from([1e-18, 1.0, 1e12]),
    activation_order=st.booleans(),
)
def test_never_worse_than_nearest(
    format, tokens, dead, seed, weight_scale, input_scale, activation_order
):
    w = weight(16, 128, seed).float() * weight_scale
    H = hessian(128, tokens, seed, dead) * input_scale
    q = quantize(w, format)
    found = Gptq(H, activation_order=activation_order).round(w, q)
    assert weighted_error(w, found.weight, H) <= weighted_error(w, q, H)
    assert torch.equal(found.weight.scale.view(torch.uint8), q.scale.view(torch.uint8))
    assert found.weight.qdata.shape == q.qdata.shape
    assert found.weight.qdata.dtype == q.qdata.dtype
    assert dequantize(found.weight).isfinite().all()
    if found.damping is None:
        assert torch.equal(found.weight.qdata.view(torch.uint8), q.qdata.view(torch.uint8))


@every_format
def test_a_ragged_block_of_columns(format):
    """K is less than or no multiple of what GPTQ takes at once, and for FP8 of a block, too."""
    K = 200 if get_format(format).ragged else get_format(format).block[1]
    w, H = weight(16, K), hessian(K, 1000)
    q = quantize(w, format)
    expected = column_by_column(w, q, H, activation_order=False, damping=DAMPINGS[0])
    found = Gptq(H).round(w, q)
    assert torch.equal(dequantize(found.weight).double(), expected)


@every_format
@pytest.mark.parametrize("H", [torch.zeros(128, 128), torch.eye(128) * 3], ids=["zero", "diagonal"])
def test_keeps_nearest_where_nothing_can_be_gained(format, H):
    w = weight(16, 128)
    q = quantize(w, format)
    found = Gptq(H).round(w, q)
    assert found.damping is None
    assert found.weight is q
    assert found.error == found.error_before


@every_format
def test_channels_without_input_are_rounded_to_nearest(format):
    dead = [3, 64, 127]
    w, H = weight(16, 128), hessian(128, 1000, dead=dead)
    q = quantize(w, format)
    found = Gptq(H).round(w, q)
    assert found.damping is not None
    assert torch.equal(dequantize(found.weight)[:, dead], dequantize(q)[:, dead])


def test_what_survives_the_loader_of_w4a8_survives():
    w = weight(32, 512)
    found = Gptq(hessian(512, 4000)).round(w, quantize(w, "w4a8")).weight
    assert torch.equal(join_scale(*split_scale(found.scale)), found.scale)


def test_damping_grows_until_the_error_is_smaller():
    taken = set()
    for seed in range(100):
        w, H = weight(1, 32, seed), hessian(32, 8, seed)
        q = quantize(w, "mxfp4")
        found = Gptq(H).round(w, q)
        smaller = DAMPINGS if found.damping is None else DAMPINGS[: DAMPINGS.index(found.damping)]
        for damping in smaller:
            E = w.double() - column_by_column(w, q, H, activation_order=False, damping=damping)
            assert float((E @ H.double() * E).sum()) >= weighted_error(w, q, H)
        taken.add(found.damping)
    assert len(taken) > 1, taken


@every_format
@in_both_orders
def test_same_bits_from_any_number_of_threads(format, activation_order):
    w, H = weight(256, 512), hessian(512, 700)
    q = quantize(w, format)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(Gptq(H, activation_order=activation_order).round(w, q))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    rounder = Gptq(H, activation_order=activation_order)
    with ThreadPoolExecutor(3) as pool:
        results += pool.map(lambda _: rounder.round(w, q), range(3))
    for found in results[1:]:
        assert torch.equal(
            found.weight.qdata.view(torch.uint8), results[0].weight.qdata.view(torch.uint8)
        )
        assert (found.damping, found.error) == (results[0].damping, results[0].error)


def test_weights_of_the_same_inputs_share_what_is_computed():
    H = hessian(128, 1000)
    gate, up = weight(16, 128, 1), weight(16, 128, 2)
    together = get_format("nvfp4").quantize_fused([gate, up], names=["gate", "up"])
    shared = Gptq(H)
    for w, q in zip((gate, up), together, strict=True):
        assert torch.equal(shared.round(w, q).weight.qdata, Gptq(H).round(w, q).weight.qdata)


def changed(H, index, value):
    H = H.clone()
    H[index] = value
    return H


@pytest.mark.parametrize(
    ("H", "message"),
    [
        (changed(torch.eye(32), (2, 5), torch.nan), r"has nan at \[2, 5\], but must be finite"),
        (changed(torch.eye(32), (2, 2), torch.inf), r"has inf at \[2, 2\], but must be finite"),
        (changed(torch.eye(32), (4, 4), -1.0), "channel 4 is -1.0, but must not be negative"),
        (changed(torch.eye(32), (1, 2), 0.5), r"has 0.5 at \[1, 2\], but 0.0 at \[2, 1\]"),
        (torch.zeros(32, 16), r"is \[32, 16\], but must be \[K, K\]"),
        (torch.eye(32).half(), "is torch.float16, but must be torch.float32"),
    ],
)
def test_invalid_hessians_are_refused(H, message):
    with pytest.raises(StatisticsError, match=f"layer 3: .*{message}"):
        Gptq(H, name="layer 3")


def test_shapes_that_do_not_fit_are_refused():
    w = weight(16, 64)
    with pytest.raises(UnsupportedError, match=r"down: shape \[16, 64\].*Hessian \[32, 32\]"):
        Gptq(torch.eye(32)).round(w, quantize(w, "mxfp4"), name="down")


def test_weights_that_are_not_finite_are_refused():
    w = weight(16, 32)
    q = quantize(w, "mxfp4")
    w[3, 4] = torch.inf
    with pytest.raises(NonFiniteError, match=r"down: inf at index \[3, 4\]"):
        Gptq(torch.eye(32)).round(w, q, name="down")


class _Operations(TorchDispatchMode):
    """Counts operations that are launches on a GPU: all but views and uninitialized memory."""

    def __init__(self):
        super().__init__()
        self.count, self.is_counting = 0, True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        makes_nothing = operation.is_view or operation in (
            torch.ops.aten.empty.memory_format,
            torch.ops.aten.empty_like.default,
        )
        self.count += self.is_counting and not makes_nothing
        return operation(*args, **(kwargs or {}))

    def one_kernel(self, element, target, scale, codes, errors, feedback):
        """One launch. It moves no errors within the block, which is no worse than nearest here."""
        self.count += 1
        self.is_counting = False
        code = element.encode((target / scale).float())
        codes.copy_(code.view(torch.uint8))
        errors -= element.decode(code).double() * scale
        self.is_counting = True


@every_format
@in_both_orders
def test_with_a_kernel_there_are_three_launches_a_block_of_columns(format, activation_order):
    counts = []
    for K in (256, 256, 512):  # once for what is kept from the first time on
        w, H = weight(24, K), hessian(K, 1000)
        q = quantize(w, format)
        with _Operations() as operations:
            by = operations.one_kernel
            found = Gptq(H, activation_order=activation_order, round_columns=by).round(w, q)
        assert found.damping == DAMPINGS[0]
        counts.append(operations.count)
    blocks = (512 - 256) // COLUMNS
    # A product, its sum with the targets, and the kernel.
    assert counts[2] - counts[1] == 3 * blocks
    assert counts[1] < 110


@pytest.mark.parametrize(
    ("format", "launches"), [("w4a8", 16), ("fp8_block", 11), ("nvfp4", 34), ("mxfp4", 34)]
)
def test_without_a_kernel_torch_launches_so_often_for_a_column(format, launches):
    counts = []
    for B in (8, 24):
        # Nothing is computed, by the operations that other devices than a CPU take.
        numbers = torch.empty(B, 5, dtype=torch.float64, device="meta")
        codes, feedback = numbers.to(torch.uint8), torch.empty_like(numbers[:, :1]).expand(B, B)
        element = get_format(format).element
        with _Operations() as operations:
            round_columns_in_torch(element, numbers, numbers, codes, numbers, feedback)
        counts.append(operations.count)
    assert counts[1] - counts[0] == launches * 16
