from __future__ import annotations

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moequant.errors import MoequantError, NonFiniteError, UnsupportedError
from moequant.formats import CONVERTIBLE, dtype_text
from moequant.native_code import jit
from moequant.quantizers import (
    NativeQuantizer,
    Quantizer,
    choose_quantizer,
    kernels,
    native,
)
from moequant.quantizers.elements import Source
from moequant.quantizers.kernels import quantizing_kernel
from moequant.storage.buffers import Arena

EVERY = [
    pytest.param(fmt, dict(zip(fmt.options, values, strict=True)), id=f"{fmt.name}-{values}")
    for fmt in CONVERTIBLE.values()
    for values in itertools.product(*fmt.options.values())
]
every_option = pytest.mark.parametrize(("fmt", "options"), EVERY)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str
)


@pytest.fixture(scope="module")
def quantizer():
    return NativeQuantizer()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mean_squares(options, weights):
    """Of input channels, from 1 to 1e-8 and some 0; None without a weighted search."""
    if options.get("search") != "weighted":
        return None
    return [((torch.arange(w.shape[-1]) * 37 % 101).float() / 100) ** 4 for w in weights]


def assert_same(quantizer, fmt, options, *weights):
    names = [f"w{i}" for i in range(len(weights))]
    squares = mean_squares(options, weights)
    wanted = fmt.quantize_fused(weights, options, names=names, mean_squares=squares)
    found = quantizer.quantize_fused(fmt, weights, options, names=names, mean_squares=squares)
    for one, other in zip(found, wanted, strict=True):
        assert (one.format, one.shape) == (other.format, other.shape)
        assert one.tensors().keys() == other.tensors().keys()
        for part, tensor in other.tensors().items():
            made = one.tensors()[part]
            assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
            bytes_made, bytes_wanted = (t.reshape(-1).view(torch.uint8) for t in (made, tensor))
            assert torch.equal(bytes_made, bytes_wanted), part


def finite(bits):
    """BF16 of these bits, NaN and Inf made 0."""
    w = bits.to(torch.int16).view(torch.bfloat16)
    return torch.where(w.isfinite(), w, 0)


def every_pattern():
    return torch.arange(1 << 16, dtype=torch.int32)


@every_option
@pytest.mark.parametrize("order", ["ascending", "shuffled", "paired with its negative"])
def test_every_bf16_pattern_in_one_matrix_gives_the_reference_bytes(quantizer, fmt, options, order):
    bits = every_pattern()
    if order == "shuffled":
        bits = bits[torch.randperm(len(bits), generator=generator())]
    elif order == "paired with its negative":
        bits = torch.stack([bits, bits ^ 0x8000], 1).flatten()
    assert_same(quantizer, fmt, options, finite(bits).reshape(-1, 512))


@every_option
def test_every_bf16_pattern_as_the_largest_of_its_block_gives_the_reference_bytes(
    quantizer, fmt, options
):
    # Rows, whose scales depend on themselves alone but for fp8_block's, scaled by one pattern each:
    # every magnitude is once what a scale is made from, beside fractions of it down to denormals.
    fractions = torch.linspace(-1, 1, 128)
    largest = finite(every_pattern()[: 1 << 15]).float()
    rows = (largest[:, None] * fractions).bfloat16()
    for chunk in rows.split(1 << 13):
        assert_same(quantizer, fmt, options, chunk)
    if fmt.name == "fp8_block":  # a block a pattern, though only every 64th
        blocks = (largest[::64, None, None] * fractions.repeat(128, 1)).bfloat16()
        assert_same(quantizer, fmt, options, blocks.reshape(-1, 128))


@every_option
@every_dtype
def test_random_weights_of_every_magnitude_give_the_reference_bytes(quantizer, fmt, options, dtype):
    w = torch.randn(384, 1024, generator=generator(1))
    exponents = torch.randint(-40, 15, (384, 8), generator=generator(2))
    spread = torch.exp2(exponents).repeat_interleave(128, 1)
    for scaled in (w * 0.02, w * spread, torch.exp2(w * 8), w * 2.0**-133, w * 2.0**120):
        weights = scaled.to(dtype)
        assert_same(quantizer, fmt, options, torch.where(weights.isfinite(), weights, 1))


@every_option
def test_ties_between_codes_give_the_reference_bytes(quantizer, fmt, options):
    # Multiples of 1/64 up to 8, and of 4 up to 512: every tie of E2M1, INT4 and E4M3, and beside
    # it, at scales of a power of two and three others.
    steps = torch.arange(-512, 512).float()
    for unit in (2.0**-20, 3 * 2.0**-20, 5 * 2.0**-7, 7.0, 2.0**100):
        rows = torch.stack([steps * unit / 64, steps * unit * 4])
        rows = rows[:, torch.randperm(1024, generator=generator(3))]
        whole = torch.cat([rows, rows.flip(1), rows * 1.0078125])
        assert_same(quantizer, fmt, options, whole.bfloat16(), (whole * 3).bfloat16())


@every_option
def test_zeros_of_both_signs_and_single_weights_give_the_reference_bytes(quantizer, fmt, options):
    w = torch.zeros(64, 512, dtype=torch.bfloat16)
    assert_same(quantizer, fmt, options, w)
    assert_same(quantizer, fmt, options, -w)
    w[torch.arange(64), torch.arange(64) * 8] = finite(torch.arange(64, dtype=torch.int32) * 500)
    assert_same(quantizer, fmt, options, w, -w)


@every_option
def test_a_set_of_several_dtypes_gives_the_reference_bytes(quantizer, fmt, options):
    w = torch.randn(64, 256, generator=generator(5))
    for dtypes in itertools.permutations([torch.bfloat16, torch.float16, torch.float32]):
        # The last decides about what they share.
        weights = [w.to(dtypes[0]), (w[:8] * 3).to(dtypes[1]), (w * 300).to(dtypes[2])]
        assert_same(quantizer, fmt, options, *weights)


@every_option
@pytest.mark.parametrize(
    "shape", [(1, 128), (3, 256), (129, 128), (130, 640), (17, 1152), (0, 256), (5, 0)], ids=str
)
def test_shapes_that_fill_no_vector_give_the_reference_bytes(quantizer, fmt, options, shape):
    w = torch.randn(shape, generator=generator(4)).bfloat16()
    assert_same(quantizer, fmt, options, w, w * 3)


@pytest.mark.parametrize("scale", CONVERTIBLE["fp8_block"].options["scale"])
@pytest.mark.parametrize("search", CONVERTIBLE["fp8_block"].options["search"])
@pytest.mark.parametrize("shape", [(1, 1), (127, 1), (1, 31), (200, 161), (128, 129), (300, 33)])
def test_ragged_blocks_give_the_reference_bytes(quantizer, scale, search, shape):
    w = torch.randn(shape, generator=generator(5)).bfloat16()
    assert_same(quantizer, CONVERTIBLE["fp8_block"], {"scale": scale, "search": search}, w)


@pytest.mark.parametrize("rule", CONVERTIBLE["nvfp4"].options["global_scale"])
def test_a_fused_set_shares_its_global_scale(quantizer, rule):
    fmt = CONVERTIBLE["nvfp4"]
    options = fmt.resolve_options({"global_scale": rule})
    gate, up = (torch.randn(64, 256, generator=generator(s)).bfloat16() for s in (6, 7))
    up[3, 5] = 1000.0
    assert_same(quantizer, fmt, options, gate, up)
    assert_same(quantizer, fmt, options, up, gate, torch.zeros_like(gate))
    one, other = quantizer.quantize_fused(fmt, [gate, up], options, names=["gate", "up"])
    assert torch.equal(one.global_scale, other.global_scale)


@every_option
def test_strided_weights_give_the_reference_bytes(quantizer, fmt, options):
    w = torch.randn(256, 512, generator=generator(8)).bfloat16()
    assert_same(quantizer, fmt, options, w.T, w[::2, :256].T)


@every_option
@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_as_the_reference_refuses_them(
    quantizer, fmt, options, dtype, value
):
    weights = [torch.ones(130, 640, dtype=dtype) for _ in range(2)]
    for row, column in ((0, 0), (129, 639), (64, 77)):
        bad = [weights[0], weights[1].clone()]
        bad[1][row, column] = value
        names, squares = ["gate", "up"], mean_squares(options, bad)
        with pytest.raises(NonFiniteError) as wanted:
            fmt.quantize_fused(bad, options, names=names, mean_squares=squares)
        with pytest.raises(NonFiniteError) as found:
            quantizer.quantize_fused(fmt, bad, options, names=names, mean_squares=squares)
        assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("fmt", CONVERTIBLE.values(), ids=CONVERTIBLE)
def test_other_dtypes_and_shapes_are_refused(quantizer, fmt):
    options = fmt.resolve_options()
    for w in (torch.ones(128, 128, dtype=torch.float64), torch.ones(2, 128, 128), torch.ones(128)):
        with pytest.raises(UnsupportedError, match=r"^w: "):
            quantizer.quantize_fused(fmt, [w], options, names=["w"])


@every_option
def test_results_lie_in_the_memory_they_were_given(quantizer, fmt, options):
    w = torch.randn(128, 512, generator=generator(9)).bfloat16()
    squares = mean_squares(options, [w])
    arena = Arena()
    for _ in range(2):
        arena.clear()
        (q,) = quantizer.quantize_fused(
            fmt, [w], options, names=["w"], empty=arena.empty, mean_squares=squares
        )
    start, stop = arena._memory.data_ptr(), arena._memory.data_ptr() + arena._memory.nbytes
    assert all(start <= t.data_ptr() < stop for t in (q.qdata, q.scale))
    (wanted,) = fmt.quantize_fused([w], options, names=["w"], mean_squares=squares)
    assert torch.equal(q.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))


def test_threads_may_share_a_quantizer(quantizer):
    fmt = CONVERTIBLE["mxfp4"]
    options = fmt.resolve_options()
    weights = [torch.randn(64, 512, generator=generator(s)).bfloat16() for s in range(32)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda w: assert_same(quantizer, fmt, options, w), weights))


@every_option
@pytest.mark.parametrize(
    ("processor", "features"),
    [
        ("x86-64", ""),
        pytest.param("x86-64-v3", "+avx2", marks=pytest.mark.full),
        pytest.param("skylake-avx512", "+avx512f", marks=pytest.mark.full),
    ],
)
def test_code_for_lesser_processors_gives_the_reference_bytes(
    monkeypatch, fmt, options, processor, features
):
    binding = pytest.importorskip("llvmlite.binding")
    host = binding.get_host_cpu_features()
    if not binding.get_default_triple().startswith("x86_64"):
        pytest.skip("names of x86-64 processors")
    if any(not host.get(feature) for feature in features.replace("+", "").split()):
        pytest.skip(f"this processor lacks {features}")

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()

    def machine():
        target = binding.Target.from_default_triple()
        return target.create_target_machine(cpu=processor, features=features, opt=3, jit=True)

    monkeypatch.setattr(jit, "_machine", machine)
    made = NativeQuantizer()
    assert_same(made, fmt, options, finite(every_pattern()).reshape(-1, 512))
    w = torch.randn(130, 640, generator=generator())
    assert_same(made, fmt, options, w.bfloat16())
    assert_same(made, fmt, options, w.half())


@every_option
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.full),
        pytest.param(torch.float32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_arm_code_needs_no_library(fmt, options, dtype):
    binding = pytest.importorskip("llvmlite.binding")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    try:
        target = binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip("this LLVM knows no ARM")
    machine = target.create_target_machine(cpu="neoverse-n1", opt=3)
    function = quantizing_kernel(fmt, Source(dtype_text(dtype)), options)
    module = binding.parse_assembly(function.text())
    module.triple, module.data_layout = triple, str(machine.target_data)
    assembly = machine.emit_assembly(module)
    assert re.search(r"\sfmul\s|\sfdiv\s", assembly)
    assert not re.search(r"\sblr?\s", assembly)  # a call


def test_the_native_quantizer_is_chosen_where_it_runs():
    fmt = CONVERTIBLE["fp8_block"]
    choice = choose_quantizer([(fmt, fmt.resolve_options(), torch.bfloat16)])
    assert isinstance(choice.quantizer, NativeQuantizer)
    assert choice.reason is None


@pytest.fixture
def fresh(monkeypatch):
    """No quantizer made yet in this process."""
    monkeypatch.setattr("moequant.quantizers._native", NativeQuantizer)


def test_without_llvmlite_torch_quantizes_and_the_reason_is_told(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    choice = choose_quantizer()
    assert choice.quantizer.name == "torch"
    assert choice.reason.startswith("llvmlite does not load: ")


HARDENED = """
import ctypes, torch
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, of Linux 6.3
    raise SystemExit("no such call")
from moequant.formats import CONVERTIBLE
from moequant.quantizers import choose_quantizer
fmt = CONVERTIBLE["mxfp4"]
print(choose_quantizer([(fmt, fmt.resolve_options(), torch.bfloat16)]).reason)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_where_new_code_may_not_run_torch_quantizes():
    done = subprocess.run([sys.executable, "-c", HARDENED], capture_output=True, text=True)
    if "no such call" in done.stderr:
        pytest.skip("this Linux cannot forbid it")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this system does not run generated code: ")


def test_a_kernel_with_other_bytes_is_not_used(fresh, monkeypatch):
    def wrong(fmt, source, options):
        return quantizing_kernel(fmt, source, {"scale_rule": "ceil"})

    monkeypatch.setattr(native, "quantizing_kernel", wrong)
    fmt = CONVERTIBLE["mxfp4"]
    choice = choose_quantizer([(fmt, {"scale_rule": "even"}, torch.bfloat16)])
    assert choice.quantizer.name == "torch"
    assert "gives other bytes than the reference" in choice.reason


def test_a_format_without_a_kernel_is_quantized_by_torch(fresh, monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", {})
    fmt = CONVERTIBLE["mxfp4"]
    choice = choose_quantizer([(fmt, fmt.resolve_options(), torch.bfloat16)])
    assert choice.quantizer.name == "torch"
    assert choice.reason == "there is no native kernel for mxfp4"


def test_code_that_does_not_compile_is_a_reason(fresh, monkeypatch):
    monkeypatch.setattr(jit, "_machine", failing_after(1, jit._machine))
    fmt = CONVERTIBLE["w4a8"]
    choice = choose_quantizer([(fmt, fmt.resolve_options(), torch.bfloat16)])
    assert choice.reason == "LLVM does not compile here: no such target"


def failing_after(calls, function):
    left = iter(range(calls))

    def limited():
        if next(left, None) is None:
            raise RuntimeError("no such target")
        return function()

    return limited


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    assert choose_quantizer().quantizer.name == "torch"
    assert choose_quantizer().reason == "MOEQUANT_QUANTIZER=torch"
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "native")
    assert isinstance(choose_quantizer().quantizer, NativeQuantizer)
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "abacus")
    with pytest.raises(MoequantError, match="abacus, but must be native or torch"):
        choose_quantizer()


@every_option
def test_torch_gives_the_reference_bytes(fmt, options):
    assert_same(Quantizer(), fmt, options, torch.randn(128, 256).bfloat16())


SIZES = {
    "as before": [1, 1, 1, 1],
    "larger, smaller, zeros": [1, 1, 64, 64, 64, 2.0**-20, 2.0**-20, 2.0**-20, 0, 0, 0, 1],
    "in turn": [1, 64, 1, 64, 1, 64],
    "in pairs": [1, 1, 64, 64, 1, 1, 64, 64],
    "ends of the range": [2.0**120, 2.0**120, 2.0**-126, 2.0**-126, 2.0**-126, 2.0**120],
}


@pytest.mark.parametrize("global_scale", CONVERTIBLE["nvfp4"].options["global_scale"])
@pytest.mark.parametrize("search", CONVERTIBLE["nvfp4"].options["search"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_a_set_is_quantized_as_it_would_be_alone_whatever_came_before_it(
    quantizer, sizes, global_scale, search
):
    options = {"global_scale": global_scale, "search": search}
    for number, size in enumerate(sizes):
        gate, up = (
            (torch.randn(48, 272, generator=generator(2 * number + i)) * size).bfloat16()
            for i in range(2)
        )
        # Its own largest weight may be in either.
        assert_same(quantizer, CONVERTIBLE["nvfp4"], options, gate, up / 8)
        assert_same(quantizer, CONVERTIBLE["nvfp4"], options, gate / 8, up)


def test_largest_weights_are_not_looked_for_while_global_scales_stay_the_same(monkeypatch):
    quantizer, looked, fmt = NativeQuantizer(), [], CONVERTIBLE["nvfp4"]
    quantizer.prepare(fmt, fmt.resolve_options(), torch.bfloat16)
    find = native._Task.find_largest
    monkeypatch.setattr(
        native._Task, "find_largest", lambda task: (looked.append(task.name), find(task))[1]
    )
    w = torch.randn(16, 64, generator=generator()).bfloat16()
    down = 1024 * w[:8]
    for name, weight in {"a": w, "b": w, "c": w, "d": w, "e": 64 * w, "f": 64 * w}.items():
        quantizer.quantize_fused(fmt, [weight], fmt.resolve_options(), names=[name])
        # Sets of another shape are other sets.
        quantizer.quantize_fused(fmt, [down], fmt.resolve_options(), names=[f"{name} down"])
    # Of "c" and "d" it was known; of "e" another scale was tried, so "f" is not tried with its.
    assert looked == ["a", "a down", "b", "b down", "f"]


def test_what_is_done_to_a_global_scale_is_nothing_to_other_sets(quantizer):
    fmt, w = CONVERTIBLE["nvfp4"], torch.ones(16, 64).bfloat16()
    for _ in range(3):
        (q,) = quantizer.quantize_fused(fmt, [w], fmt.resolve_options(), names=["w"])
        q.global_scale.mul_(3)
    assert_same(quantizer, fmt, fmt.resolve_options(), w)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_where_its_scale_was_tried(quantizer, bad):
    fmt, w = CONVERTIBLE["nvfp4"], torch.ones(16, 64).bfloat16()
    for _ in range(3):
        quantizer.quantize_fused(fmt, [w, w], fmt.resolve_options(), names=["gate", "up"])
    spoilt = w.clone()
    spoilt[3, 5] = bad
    with pytest.raises(NonFiniteError, match=r"^up: .* at index \[3, 5\]"):
        quantizer.quantize_fused(fmt, [w, spoilt], fmt.resolve_options(), names=["gate", "up"])
