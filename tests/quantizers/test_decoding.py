"""Weights in a quantized form, decoded, quantized anew and compared: as the reference does."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from moequant.errors import NonFiniteError
from moequant.formats import (
    CONVERTIBLE,
    REGISTRY,
    QuantizedWeight,
    dequantize,
    dtype_text,
    quantize,
    signal_and_noise,
)
from moequant.native_code import jit
from moequant.quantizers import (
    NativeQuantizer,
    Quantizer,
    choose_quantizer,
    decoding,
    elements,
    encoded,
    native,
)
from moequant.quantizers.encoded import Encoded
from moequant.quantizers.kernels import amax, quantizing_kernel

DTYPES = (torch.float32, torch.bfloat16)
READ = [name for name, fmt in REGISTRY.items() if "read" in fmt.uses]
every_stored = pytest.mark.parametrize("stored", READ)
every_format = pytest.mark.parametrize("fmt", CONVERTIBLE.values(), ids=CONVERTIBLE)
# N and K: one block, several, ragged, runs of 16, 32 and 64 columns that share a scale.
SHAPES = [(128, 128), (130, 1152), (3, 16), (3, 32), (3, 256), (257, 48), (257, 96), (5, 2880)]


def takes(fmt, shape):
    return fmt.ragged or shape[1] % fmt.block[1] == 0


STORED_SHAPES = [(name, shape) for name in READ for shape in SHAPES if takes(REGISTRY[name], shape)]
every_stored_shape = pytest.mark.parametrize(("stored", "shape"), STORED_SHAPES, ids=str)


def mean_squares(options, weights):
    """Of input channels, from 1 to 1e-8 and some 0; None without a weighted search."""
    if options.get("search") != "weighted":
        return None
    return [((torch.arange(w.shape[-1]) * 37 % 101).float() / 100) ** 4 for w in weights]


@pytest.fixture(scope="module")
def quantizer():
    return NativeQuantizer()


def weight(stored, qdata, scale, global_scale=None):
    K = qdata.shape[1] * (2 if qdata.dtype == torch.uint8 else 1)
    shape = torch.Size((len(qdata), K))
    return QuantizedWeight(
        format=stored, qdata=qdata, scale=scale, global_scale=global_scale, shape=shape
    )


def random_weight(stored, shape, seed=0):
    """Codes and scales at random, each scale near 2**-6."""
    generator = torch.Generator().manual_seed(seed)
    N, K = shape
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    if REGISTRY[stored].codes_per_byte == 2:
        codes = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    else:
        codes = codes.view(torch.float8_e4m3fn)
    fmt = REGISTRY[stored]
    rows, columns = fmt.block
    extents = -(-N // rows), -(-K // min(columns, K))
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        scale = torch.randint(110, 130, extents, generator=generator, dtype=torch.uint8)
        return weight(stored, codes, scale.view(fmt.scale_dtype))
    scale = torch.rand(extents, generator=generator) * 2.0**-6 + 2.0**-8
    global_scale = torch.tensor(0.3) if fmt.has_global_scale else None
    return weight(stored, codes, scale.to(fmt.scale_dtype), global_scale)


def float_scales():
    """float32 of every exponent, both signs, some mantissas; zeros, denormals, Inf and NaN too."""
    heads = torch.arange(512, dtype=torch.int32) << 23
    tails = torch.tensor([0, 1, 0x123456, 0x7FFFFF], dtype=torch.int32)
    return (heads[:, None] | tails).view(torch.float32).reshape(-1, 1)


def every_byte(rows):
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).expand(rows, 256).contiguous()


def exhaustive(stored):
    """Every byte of codes under every scale that there is, or every exponent of one."""
    fmt = REGISTRY[stored]
    if stored == "fp8_tensor":
        return [
            weight(stored, every_byte(1).view(fmt.qdata_dtype), s[None])
            for s in float_scales()[::61]
        ]
    rows, columns = fmt.block
    if fmt.scale_dtype == torch.float32:
        scale = float_scales()[:: 61 if rows > 1 else 1]
    elif fmt.scale_dtype == torch.bfloat16:
        patterns = torch.arange(0, 1 << 16, 16, dtype=torch.int32).to(torch.int16)
        scale = patterns.view(torch.bfloat16).reshape(-1, 1)
    else:
        scale = torch.arange(256).to(torch.uint8)[:, None].view(fmt.scale_dtype)
    K = 256 * fmt.codes_per_byte
    codes = every_byte(rows * len(scale)).view(fmt.qdata_dtype)
    scale = scale.expand(-1, -(-K // min(columns, K))).contiguous()
    if not fmt.has_global_scale:
        return [weight(stored, codes, scale)]
    globals_ = (2.0**-126, 2.0**-20, 0.3, 1.0, 2.0**110, math.inf)
    return [weight(stored, codes, scale, torch.tensor(g)) for g in globals_]


def decode_anything(quantizer, q, dtype):
    """As `decode`, NaN and Inf too."""
    quantizer.prepare_decoding(q.format, dtype)
    return native._decode(quantizer._decoders[q.format, dtype], q, dtype, torch.empty)


def bits(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_text)
@every_stored
def test_every_code_under_every_scale_decodes_to_the_reference_bytes(quantizer, stored, dtype):
    for q in exhaustive(stored):
        wanted = dequantize(q).to(dtype)
        found, is_finite = decode_anything(quantizer, q, dtype)
        # Of what is refused only that it is refused counts; bfloat16 makes some NaN a number.
        refused = ~dequantize(q).isfinite()
        assert not is_finite
        assert torch.equal(bits(found)[~refused], bits(wanted)[~refused])
        if dtype == torch.float32:
            assert torch.equal(found.isfinite(), ~refused)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_text)
@every_stored_shape
def test_every_shape_decodes_to_the_reference_bytes(quantizer, stored, shape, dtype):
    q = random_weight(stored, shape)
    found = quantizer.decode(q, dtype, name="w")
    assert found.dtype == dtype
    assert torch.equal(bits(found), bits(dequantize(q).to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_text)
@pytest.mark.parametrize("stored", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("shape", [(5, 161), (130, 8), (0, 128), (3, 0)], ids=str)
def test_columns_that_fill_no_vector_decode_by_the_reference(quantizer, stored, shape, dtype):
    N, K = shape
    scale = torch.rand(-(-N // 128), -(-K // 128)) if stored == "fp8_block" else torch.rand(N, 1)
    q = weight(stored, torch.randn(shape).to(torch.float8_e4m3fn), scale)
    found = quantizer.decode(q, dtype, name="w")
    assert torch.equal(bits(found), bits(dequantize(q).to(dtype)))
    assert quantizer.compare(q, found) == signal_and_noise(q, found)
    fmt = CONVERTIBLE["fp8_block"]
    (made,) = quantizer.quantize_fused(fmt, [q], fmt.resolve_options(), names=["w"])
    assert_same([made], fmt.quantize_fused([dequantize(q)], names=["w"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_text)
@every_stored
def test_nan_inf_and_what_rounds_to_inf_are_refused_by_index(quantizer, stored, dtype):
    largest = torch.finfo(torch.float32).max
    for bad in (math.nan, math.inf, largest):
        q = random_weight(stored, (130, 256))
        if q.global_scale is not None:
            q.global_scale.fill_(bad)
            q.scale[-1, -1] = 448
        elif q.scale.dtype == torch.float8_e8m0fnu:
            q.scale.view(torch.uint8)[-1, -1] = 255 if bad is math.nan else 254
        else:
            q.scale[-1, -1] = bad
        with pytest.raises(NonFiniteError) as wanted:
            Quantizer().decode(q, dtype, name="w")
        with pytest.raises(NonFiniteError) as found:
            quantizer.decode(q, dtype, name="w")
        assert str(found.value) == str(wanted.value)
        for fmt in CONVERTIBLE.values() if dtype == torch.float32 else ():
            both = [random_weight(stored, (130, 256)), q]
            with pytest.raises(NonFiniteError) as wanted:
                Quantizer().quantize_fused(fmt, both, fmt.resolve_options(), names="vw")
            with pytest.raises(NonFiniteError) as found:
                quantizer.quantize_fused(fmt, both, fmt.resolve_options(), names="vw")
            assert str(found.value) == str(wanted.value)
        assert not math.isfinite(quantizer.compare(q, q)[0])


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one.format, one.shape) == (other.format, other.shape)
        for part, tensor in other.tensors().items():
            made = one.tensors()[part]
            assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (made, tensor))), part


@pytest.mark.parametrize(
    ("stored", "shape", "fmt"),
    [
        pytest.param(stored, shape, fmt, id=f"{stored}-{shape}-{fmt.name}")
        for stored, shape in STORED_SHAPES
        for fmt in CONVERTIBLE.values()
        if takes(fmt, shape)
    ],
)
def test_what_is_stored_is_quantized_to_the_reference_bytes(quantizer, stored, shape, fmt):
    weights = [random_weight(stored, shape, seed) for seed in (1, 2)]
    numbers = [dequantize(q) for q in weights]
    # Options have nothing to do with how weights are stored: all of them for one form.
    every = itertools.product(*fmt.options.values()) if stored == "mxfp4" else [()]
    for values in every:
        options = fmt.resolve_options(dict(zip(fmt.options, values, strict=False)))
        names, squares = ["gate", "up"], mean_squares(options, weights)
        found = quantizer.quantize_fused(fmt, weights, options, names=names, mean_squares=squares)
        wanted = fmt.quantize_fused(numbers, options, names=names, mean_squares=squares)
        assert_same(found, wanted)


@every_format
@every_stored
def test_every_finite_number_is_quantized_to_the_reference_bytes(quantizer, stored, fmt):
    options = fmt.resolve_options()
    for q in exhaustive(stored):
        if stored.startswith("fp8"):  # NaN is in every row of theirs
            codes = q.qdata.view(torch.uint8)
            codes[(codes & 0x7F) == 0x7F] = 0
        # Rows hold one scale each; those of refused numbers are left out.
        numbers = dequantize(q)
        rows = numbers.isfinite().all(1)
        if stored == "fp8_tensor":
            kept = q
        elif stored == "fp8_block":
            blocks = rows.reshape(-1, 128).all(1)
            rows = blocks.repeat_interleave(128)
            kept = weight(stored, q.qdata[rows], q.scale[blocks])
        else:
            kept = weight(stored, q.qdata[rows], q.scale[rows], q.global_scale)
        if rows.any():
            found = quantizer.quantize_fused(fmt, [kept], options, names=["w"])
            assert_same(found, fmt.quantize_fused([numbers[rows]], options, names=["w"]))


@every_format
def test_a_set_of_several_forms_gives_the_reference_bytes(quantizer, fmt):
    weights = [random_weight(stored, (130, 1152)) for stored in READ]
    weights.append(torch.randn(16, 1152).bfloat16())
    names = [str(i) for i in range(len(weights))]
    options = fmt.resolve_options()
    found = quantizer.quantize_fused(fmt, weights, options, names=names)
    assert_same(found, Quantizer().quantize_fused(fmt, weights, options, names=names))


@every_stored_shape
def test_sums_are_the_reference_sums_to_the_last_bit(quantizer, stored, shape):
    before = random_weight(stored, shape)
    others = [random_weight(stored, shape, seed=1), before]
    numbers = dequantize(before)
    others += [(numbers * 1.01).to(dtype) for dtype in (*DTYPES, torch.float16)]
    others += [quantize(numbers, name) for name, fmt in CONVERTIBLE.items() if takes(fmt, shape)]
    for after in others:
        found = quantizer.compare(before, after)
        assert found == signal_and_noise(before, after) == Quantizer().compare(before, after)
    assert quantizer.compare(before, before)[1] == 0


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_text)
def test_plain_weights_are_compared_too(quantizer, fmt, dtype):
    w = (torch.randn(130, 1152, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)
    q = quantize(w, fmt.name)
    assert quantizer.compare(w, q) == signal_and_noise(w, q)
    assert quantizer.compare(w, w * 2) == signal_and_noise(w, w * 2)


def test_sums_are_those_of_squares():
    before, after = random_weight("mxfp4", (70, 96)), torch.randn(70, 96).bfloat16()
    numbers = dequantize(before).double().flatten().tolist()
    written = after.double().flatten().tolist()
    signal, noise = signal_and_noise(before, after)
    # Squares are exact in float64, and of 6720 positive sums each rounds by at most 2**-53 of it.
    assert signal == pytest.approx(math.fsum(x * x for x in numbers), rel=6720 * 2.0**-53)
    # Differences are rounded to float32 first, by at most 2**-24 of each.
    exact = math.fsum((x - y) ** 2 for x, y in zip(numbers, written, strict=True))
    assert noise == pytest.approx(exact, rel=2.0**-22)


def test_the_smallest_difference_there_is_is_noise(quantizer):
    q = weight("fp8_channel", torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.ones(2, 1))
    after = torch.zeros(2, 32)
    after[1, 31] = 2.0**-149
    assert quantizer.compare(q, after) == (0.0, 2.0**-298)
    assert quantizer.compare(q, -torch.zeros(2, 32)) == (0.0, 0.0)


@every_stored
def test_parts_need_not_be_contiguous(quantizer, stored):
    q = random_weight(stored, (256, 256))
    spread = {}
    for name in ("qdata", "scale"):
        part = getattr(q, name)
        wide = torch.empty((len(part), 2 * part.shape[1]), dtype=part.dtype)
        wide[:, ::2] = part
        spread[name] = wide[:, ::2]
    strided = weight(stored, spread["qdata"], spread["scale"], q.global_scale)
    found = quantizer.decode(strided, torch.float32, name="w")
    assert torch.equal(found, dequantize(q))


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"])
@every_stored
def test_code_for_other_processors_needs_no_library(stored, triple):
    binding = pytest.importorskip("llvmlite.binding")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip("this LLVM does not know it")
    cpu = "neoverse-n1" if triple.startswith("aarch64") else "x86-64"
    machine = target.create_target_machine(cpu=cpu, opt=3)
    source = Encoded(stored, "w_")
    texts = [decoding.decode(source, "bfloat16"), decoding.compare(source, Encoded(stored))]
    texts += [
        amax(source),
        quantizing_kernel(CONVERTIBLE["fp8_block"], source, {"scale": "float32"}),
    ]
    for function in texts:
        module = binding.parse_assembly(function.text())
        module.triple, module.data_layout = triple, str(machine.target_data)
        assembly = machine.emit_assembly(module)
        assert re.search(r"\s(fmul|mulps)\s", assembly)
        assert not re.search(r"\s(blr?|callq?)\s", assembly)


@every_stored
def test_code_for_the_least_processor_gives_the_reference_bytes(monkeypatch, stored):
    binding = pytest.importorskip("llvmlite.binding")
    if not binding.get_default_triple().startswith("x86_64"):
        pytest.skip("names of x86-64 processors")

    def machine():
        target = binding.Target.from_default_triple()
        return target.create_target_machine(cpu="x86-64", features="", opt=3, jit=True)

    monkeypatch.setattr(jit, "_machine", machine)
    made = NativeQuantizer()
    q = random_weight(stored, (130, 256))
    assert torch.equal(made.decode(q, torch.float32, name="w"), dequantize(q))
    after = random_weight("nvfp4", (130, 256))
    assert made.compare(q, after) == signal_and_noise(q, after)
    fmt = CONVERTIBLE["nvfp4"]
    found = made.quantize_fused(fmt, [q], fmt.resolve_options(), names=["w"])
    assert_same(found, fmt.quantize_fused([dequantize(q)], names=["w"]))


@pytest.fixture
def fresh(monkeypatch):
    """No quantizer made yet in this process."""
    monkeypatch.setattr("moequant.quantizers._native", NativeQuantizer)


def test_a_kernel_with_other_numbers_is_not_used(fresh, monkeypatch):
    wrong = {"e2m1": lambda code: elements.decode_e2m1(code ^ 8)}
    monkeypatch.setattr(encoded, "_DECODERS", encoded._DECODERS | wrong)
    choice = choose_quantizer([(REGISTRY["bf16"], {}, "mxfp4")])
    assert choice.quantizer.name == "torch"
    assert re.match("decoding mxfp4, .* gives other numbers than the reference", choice.reason)
    fmt = CONVERTIBLE["w4a8"]
    choice = choose_quantizer([(fmt, fmt.resolve_options(), "mxfp4")])
    assert re.match("w4a8 of mxfp4, .* gives other bytes than the reference", choice.reason)


def test_a_kernel_with_other_sums_is_not_used(fresh, monkeypatch):
    monkeypatch.setattr(decoding, "_square", lambda numbers: numbers.to("double"))
    choice = choose_quantizer([(REGISTRY["bf16"], {}, "mxfp4")])
    assert choice.quantizer.name == "torch"
    assert re.match(
        "the comparison of mxfp4, .* gives other sums than the reference", choice.reason
    )


def test_a_format_that_kernels_cannot_read_is_decoded_by_torch(fresh, monkeypatch):
    monkeypatch.setattr(encoded, "_DECODERS", {})
    fmt = CONVERTIBLE["fp8_block"]
    for job in ((REGISTRY["bf16"], {}, "mxfp4"), (fmt, fmt.resolve_options(), "mxfp4")):
        choice = choose_quantizer([job])
        assert choice.quantizer.name == "torch"
        assert choice.reason == "it cannot decode mxfp4"
