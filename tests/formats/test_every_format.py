"""What holds for every format, over CONVERTIBLE: a new one is covered unless a table below says no.

Hand-computed numbers and what only one format promises lie in test_<format>.py.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

import moequant
from moequant.errors import CheckpointError, NonFiniteError, RecipeError, UnsupportedError
from moequant.formats import (
    CONVERTIBLE,
    Format,
    QuantizedWeight,
    check_parts,
    dtype_text,
    get_format,
    stack,
    tile_rows,
)
from moequant.formats.importance import importance_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max

# Formats, or options of one, that do not keep a rule every other does, each with its reason.
NOT_SIGN_SYMMETRIC = {"w4a8": "codes reach -8 but not 8"}
NO_HALF_STEP_BOUND = {"w4a8": "w4a8 gives up the largest weight of a group for a smaller step"}
NOT_IDEMPOTENT = {
    ("fp8_block", "float32", "none"): "448 * scale / 448 may be one ulp off; see test_fp8_block",
    ("fp8_block", "float32", "weighted"): "as without a search",
    ("fp8_channel", "float32"): "448 * scale / 448 may be one ulp off",
    ("fp8_tensor", "float32"): "448 * scale / 448 may be one ulp off",
} | {
    ("w4a8", *values): "dequantized groups no longer ask for the step they were given"
    for values in itertools.product(*CONVERTIBLE["w4a8"].options.values())
}


def every_case(exceptions: Container[object] = ()) -> Iterator[object]:
    for name, fmt in CONVERTIBLE.items():
        for values in itertools.product(*fmt.options.values()):
            if name in exceptions or (name, *values) in exceptions:
                continue
            options = dict(zip(fmt.options, values, strict=True))
            yield pytest.param(fmt, options, id="-".join((name, *values)))


def every_format_but(exceptions: Container[object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "fmt", [pytest.param(f, id=n) for n, f in CONVERTIBLE.items() if n not in exceptions]
    )


def every_option_but(exceptions: Container[object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("fmt", "options"), list(every_case(exceptions)))


every_format = every_format_but(())
every_option = every_option_but(())


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def of_every_magnitude(*, rows_per_exponent: int = 1, K: int = 512) -> Tensor:
    """[N, K] float32: normal numbers times each power of two, denormals and FLT_MAX included."""
    exponent = torch.arange(-149, 129).repeat_interleave(rows_per_exponent)
    w = normal(len(exponent), K, dtype=torch.float32) * 50
    w = torch.ldexp(w.double(), exponent[:, None]).clamp(-FLOAT32_MAX, FLOAT32_MAX).float()
    w[-1] = -FLOAT32_MAX
    w[:, 7] = -0.0
    return w


def assert_same_bytes(q: QuantizedWeight, other: QuantizedWeight) -> None:
    assert (q.format, q.shape) == (other.format, other.shape)
    parts, others = q.tensors(), other.tensors()
    assert parts.keys() == others.keys()
    for name, part in parts.items():
        assert (part.dtype, part.shape) == (others[name].dtype, others[name].shape), name
        # Bytes, because == calls -0 and 0 equal and NaN and NaN different.
        as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (part, others[name])]
        assert torch.equal(*as_bytes), name


def mean_squares(options: Mapping[str, str], weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Of input channels, from 1 to 1e-8 and some 0; None without a weighted search."""
    if options.get("search") != "weighted":
        return None
    return [((torch.arange(w.shape[-1]) * 37 % 101).float() / 100) ** 4 for w in weights]


def importance(options: Mapping[str, str], K: int) -> Tensor | None:
    """What columns count in a weighted search; None without one."""
    found = mean_squares(options, [torch.empty(1, K)])
    return found and importance_of(found[0], K)


def quantized(fmt: Format, w: Tensor, options: Mapping[str, str] | None = None) -> QuantizedWeight:
    found = mean_squares(options or {}, [w])
    return fmt.quantize(w, options, mean_square=found and found[0])


def requantize(fmt: Format, q: QuantizedWeight, options: dict[str, str]) -> QuantizedWeight:
    """Quantize what `q` decodes to, under the global scale it has, or the one of all weights."""
    return fmt._quantize_in_tiles(
        fmt.dequantize(q),
        fmt.resolve_options(options),
        q.scale[..., 0, 0] if fmt.shares_scale else q.global_scale,
        importance(options, q.shape[-1]),
    )


SHAPES = [(8, 512), (3, 8, 512), (2, 3, 4, 256), (1, 128), (0, 512), (2, 0, 512), (0, 4, 512)]


@pytest.mark.parametrize("shape", [*SHAPES, (4, 0), (2, 4, 0)], ids=str)
@every_option
def test_specs_equal_what_quantize_makes(
    fmt: Format, options: dict[str, str], shape: tuple[int, ...]
) -> None:
    q = quantized(fmt, normal(*shape), options)
    specs = fmt.specs(shape)
    assert specs.keys() == q.tensors().keys()
    for name, part in q.tensors().items():
        assert (part.dtype, tuple(part.shape)) == (specs[name].dtype, specs[name].shape), name
        assert part.nbytes == specs[name].size_bytes
        assert part.is_contiguous()
    decoded = fmt.dequantize(q)
    assert (decoded.dtype, decoded.shape, q.shape) == (torch.float32, shape, shape)


@every_option
def test_a_batch_equals_its_members_byte_for_byte(fmt: Format, options: dict[str, str]) -> None:
    w = normal(4, 24, 512) * torch.tensor([1.0, 2.0**-9, 300.0, 0.0]).bfloat16()[:, None, None]
    batch = quantized(fmt, w, options)
    members = [quantized(fmt, member, options) for member in w]
    assert_same_bytes(batch, stack(members))
    for i, member in enumerate(members):
        assert_same_bytes(batch[i], member)
        assert torch.equal(fmt.dequantize(batch)[i], fmt.dequantize(member))


@every_option
def test_a_weight_quantized_in_tiles_equals_the_same_quantized_whole(
    fmt: Format, options: dict[str, str]
) -> None:
    w = normal(600, 4096) * torch.exp2(torch.arange(600) % 7 - 3)[:, None].bfloat16()
    w[130:140] = 0
    # Several tiles, the last incomplete; a batch goes whole.
    assert 600 // tile_rows(4096, fmt.tile_multiple) > 2
    assert 600 % tile_rows(4096, fmt.tile_multiple) > 0
    assert_same_bytes(quantized(fmt, w, options), quantized(fmt, w[None], options)[0])


@every_option
def test_two_leading_dimensions_equal_one(fmt: Format, options: dict[str, str]) -> None:
    w = normal(6, 8, 256)
    folded = quantized(fmt, w.reshape(2, 3, 8, 256), options)
    assert_same_bytes(stack([folded[0][i] for i in range(3)]), quantized(fmt, w[:3], options))


@every_option
def test_zeros_become_zeros(fmt: Format, options: dict[str, str]) -> None:
    for w in (torch.zeros(8, 256), -torch.zeros(8, 256)):
        q = quantized(fmt, w, options)
        assert torch.equal(fmt.dequantize(q), torch.zeros(8, 256))
        assert (q.scale.float() > 0).all()
        assert q.scale.float().isfinite().all()
        assert q.global_scale is None or q.global_scale == 1


@every_option
def test_a_zero_group_does_not_disturb_the_others(fmt: Format, options: dict[str, str]) -> None:
    w = normal(256, 512)
    w[:128, 128:256] = 0
    d = fmt.dequantize(quantized(fmt, w, options))
    assert (d[:128, 128:256] == 0).all()
    assert (d[:, :128] != 0).float().mean() > 0.8


@every_option_but(NOT_SIGN_SYMMETRIC)
def test_negated_weights_give_negated_values(fmt: Format, options: dict[str, str]) -> None:
    w = of_every_magnitude()
    q, negated = quantized(fmt, w, options), quantized(fmt, -w, options)
    sign_bits = {1: 0x80, 2: 0x88}[fmt.codes_per_byte]
    assert torch.equal(negated.qdata.view(torch.uint8), q.qdata.view(torch.uint8) ^ sign_bits)
    assert_same_bytes(QuantizedWeight(**{**vars(negated), "qdata": q.qdata}), q)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_format
def test_nan_and_inf_are_refused_by_name_index_and_value(
    fmt: Format, dtype: torch.dtype, value: float
) -> None:
    w = normal(2, 4, 256, dtype=dtype)
    w[1, 2, 130] = value
    w[1, 3, 0] = value
    with pytest.raises(NonFiniteError, match=rf"layers\.3\.w1: {value} at index \[1, 2, 130\]"):
        fmt.quantize(w, name="layers.3.w1")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64, torch.bool], ids=str)
@every_format
def test_other_dtypes_are_refused(fmt: Format, dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedError, match=f"w1: dtype {dtype_text(dtype)}, but must be one of: bfloat16"
    ):
        fmt.quantize(torch.zeros(4, 256, dtype=dtype), name="w1")


@every_option
def test_the_same_numbers_give_the_same_bytes_from_every_dtype(
    fmt: Format, options: dict[str, str]
) -> None:
    w = normal(16, 512)
    # BF16 numbers below 2**-14 may not fit the denormals of FP16.
    w = torch.where(w.abs() < 2.0**-14, 0.0, w)
    assert torch.equal(w.half().float(), w.float())
    q = quantized(fmt, w, options)
    assert_same_bytes(quantized(fmt, w.half(), options), q)
    assert_same_bytes(quantized(fmt, w.float(), options), q)


@every_format
def test_a_shape_the_blocks_do_not_divide_is_refused_by_name(fmt: Format) -> None:
    block_n, block_k = (min(extent, 256) for extent in fmt.block)
    shape = (2 * block_n, 3 * block_k + 2)
    if fmt.ragged:
        w = normal(*shape)
        assert fmt.dequantize(fmt.quantize(w)).shape == fmt.specs(shape)["qdata"].shape == shape
        return
    message = (
        rf"w1: K = {shape[1]} is not a multiple of {block_k} \({fmt.name}\); keep it in .*\"keep\""
    )
    with pytest.raises(UnsupportedError, match=message):
        fmt.quantize(normal(*shape), name="w1")
    with pytest.raises(UnsupportedError, match=f"K = {shape[1]}"):
        fmt.specs(shape)


@every_format
def test_a_vector_is_refused_by_name(fmt: Format) -> None:
    with pytest.raises(UnsupportedError, match=r"bias: shape \[256\], but \w+ needs \[..., N, K\]"):
        fmt.quantize(normal(256), name="bias")
    with pytest.raises(UnsupportedError, match=r"scalar: shape \[\], but \w+ needs \[..., N, K\]"):
        fmt.quantize(torch.tensor(1.0), name="scalar")


def broken_parts(q: QuantizedWeight) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Part, what an error must say of it, and the parts of `q` with that one broken."""
    parts = q.tensors()
    for part, tensor in parts.items():
        wanted = rf"should be {dtype_text(tensor.dtype)} \[{', '.join(map(str, tensor.shape))}\]"
        yield part, rf"is missing, but it {wanted}", {k: t for k, t in parts.items() if k != part}
        yield part, rf"is float64 .*{wanted}", {**parts, part: torch.zeros(tensor.shape).double()}
        yield part, rf"is \w+ \[1, .*{wanted}", {**parts, part: tensor[None]}
    extra = {**parts, "row_scale": torch.ones(8)}
    yield "row_scale", r"is float32 \[8\], but it should be missing", extra


@every_format
def test_parts_that_are_not_the_format_s_are_refused_by_weight_and_part(fmt: Format) -> None:
    q = fmt.quantize(normal(3, 8, 256))
    check_parts(q.tensors(), fmt.name, q.shape, "w13")
    for part, said, parts in broken_parts(q):
        with pytest.raises(CheckpointError, match=rf"^w13\.{part} {said}; .* again$"):
            check_parts(parts, fmt.name, q.shape, "w13")


def test_what_is_no_weight_is_refused_by_its_type():
    with pytest.raises(
        UnsupportedError, match=r"weight is str, but must be a tensor \[\.\.\., N, K"
    ):
        moequant.quantize("x", "nvfp4")
    with pytest.raises(UnsupportedError, match="q is Tensor, but must be a QuantizedWeight"):
        moequant.dequantize(torch.ones(4, 4))


def test_parts_are_checked_against_a_shape_and_format_that_exist() -> None:
    with pytest.raises(UnsupportedError, match="unknown format 'fp5'"):
        check_parts({}, "fp5", (8, 256), "w2")
    with pytest.raises(UnsupportedError, match="w2: K = 40 is not a multiple of 32"):
        check_parts({}, "mxfp4", (8, 40), "w2")


@every_format
def test_specs_say_what_they_are_as_messages_do(fmt: Format) -> None:
    assert str(fmt.specs((2, 8, 256))["qdata"]) == (
        f"{str(fmt.qdata_dtype).removeprefix('torch.')} [2, 8, {256 // fmt.codes_per_byte}]"
    )


@every_format
def test_unknown_options_and_values_are_recipe_errors(fmt: Format) -> None:
    w = normal(4, 256)
    with pytest.raises(RecipeError, match=f"{fmt.name} has no option 'rounding'; its options: "):
        quantized(fmt, w, {"rounding": "up"})
    for option, values in fmt.options.items():
        with pytest.raises(RecipeError, match=f"{fmt.name}: {option} = 'x', .*{values[-1]}"):
            quantized(fmt, w, {option: "x"})


@every_format
def test_the_first_value_of_an_option_is_its_default(fmt: Format) -> None:
    first = {option: values[0] for option, values in fmt.options.items()}
    assert fmt.resolve_options() == first
    assert_same_bytes(fmt.quantize(normal(4, 256)), quantized(fmt, normal(4, 256), first))


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedError, match=f"'fp5'; use one of: {', '.join(CONVERTIBLE)}"):
        get_format("fp5")


@every_option
def test_the_number_of_threads_changes_no_byte(fmt: Format, options: dict[str, str]) -> None:
    # In tiles, as conversion does, and whole; both beyond torch's grain of 32768 elements, so that
    # threads share the work.
    weights = [normal(600, 1024), normal(2, 256, 1024)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [quantized(fmt, w, options) for w in weights]
        torch.set_num_threads(3)
        for w, q in zip(weights, alone, strict=True):
            assert_same_bytes(quantized(fmt, w, options), q)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("exponent", [-4, 1, 7])
@every_option
def test_a_power_of_two_on_the_weights_moves_only_scales(
    fmt: Format, options: dict[str, str], exponent: int
) -> None:
    w = normal(16, 512, dtype=torch.float32) * 16  # well above the floor of w4a8's row scales
    q, moved = quantized(fmt, w, options), quantized(fmt, w * 2.0**exponent, options)
    assert torch.equal(moved.qdata.view(torch.uint8), q.qdata.view(torch.uint8))
    assert torch.equal(fmt.dequantize(moved), fmt.dequantize(q) * 2.0**exponent)


@every_option_but(NOT_IDEMPOTENT)
def test_quantizing_the_decoded_values_gives_them_again(
    fmt: Format, options: dict[str, str]
) -> None:
    q = quantized(fmt, normal(128, 512), options)
    assert torch.equal(fmt.dequantize(requantize(fmt, q, options)), fmt.dequantize(q))


def half_step_e2m1(x: Tensor) -> Tensor:
    """Half the distance between the E2M1 numbers around |x|; beyond 6 as between 4 and 6."""
    return torch.where(x < 2, 0.25, torch.where(x < 4, 0.5, 1.0))


def half_step_e4m3(x: Tensor) -> Tensor:
    """Half the distance between the E4M3 numbers around |x|: 2**-4 of its power of two."""
    return torch.exp2(torch.floor(torch.log2(x.clamp(min=2.0**-6))) - 4)


HALF_STEP = {
    "fp8_block": half_step_e4m3,
    "nvfp4": half_step_e2m1,
    "mxfp4": half_step_e2m1,
    "fp8_channel": half_step_e4m3,
    "mxfp8": half_step_e4m3,
    "fp8_tensor": half_step_e4m3,
}


@every_format_but(NO_HALF_STEP_BOUND)
def test_no_weight_is_off_by_more_than_half_a_step(fmt: Format) -> None:
    # Rows of unlike magnitude: blocks that span them, and scales far from a global scale's.
    w = normal(256, 512, dtype=torch.float32) * torch.exp2(torch.arange(256) % 8)[:, None]
    q = fmt.quantize(w)
    block_n, block_k = fmt.block_of(q)
    scale = q.scale.double().repeat_interleave(block_n, 0).repeat_interleave(block_k, 1)
    if q.global_scale is not None:
        scale = scale * q.global_scale.double()
    bound = HALF_STEP[fmt.name]((w.double() / scale).abs()) * scale
    # A float32 quotient may round onto a tie from 2**-24 of itself away, 16 half steps at most.
    assert ((fmt.dequantize(q).double() - w.double()).abs() <= bound * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
@every_format
def test_relative_error_on_a_normal_weight_keeps_its_budget(fmt: Format, seed: int) -> None:
    w = normal(1024, 4096, seed=seed)
    error = fmt.dequantize(fmt.quantize(w)) - w.float()
    assert error.norm() / w.float().norm() <= fmt.ordinary_error


@every_option
def test_every_finite_weight_decodes_to_a_finite_one(fmt: Format, options: dict[str, str]) -> None:
    w = of_every_magnitude()
    # Alone, where each row's scales are its own, and together, under one global scale.
    for batch in (w[:, None], w):
        q = quantized(fmt, batch, options)
        decoded = fmt.dequantize(q)
        assert decoded.isfinite().all()
        assert decoded.bfloat16().isfinite().all()
        assert (q.scale.float() > 0).all()
        assert q.scale.float().isfinite().all()


@every_option
def test_strided_weights_give_contiguous_parts_of_the_same_bytes(
    fmt: Format, options: dict[str, str]
) -> None:
    w = normal(3, 16, 512)
    q = quantized(fmt, w, options)
    transposed = w.mT.contiguous().mT
    sliced = torch.cat([w, w], dim=-1).reshape(3, 16, 2, 512).select(2, 1)
    interleaved = torch.stack([w, w * 3], dim=1)[:, 0]
    permuted = w.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for strided in (transposed, sliced, interleaved, permuted):
        assert not strided.is_contiguous()
        made = quantized(fmt, strided, options)
        assert all(part.is_contiguous() for part in made.tensors().values())
        assert_same_bytes(made, q)
    expanded = w[:1].expand(4, 16, 512)
    assert_same_bytes(quantized(fmt, expanded, options)[3], quantized(fmt, w[0], options))


@every_option
def test_quantize_leaves_its_input_alone_and_carries_no_gradient(
    fmt: Format, options: dict[str, str]
) -> None:
    w = torch.nn.Parameter(normal(8, 256, dtype=torch.float32))
    before = w.detach().clone()
    q = quantized(fmt, w, options)
    assert torch.equal(w, before)
    assert not any(part.requires_grad for part in q.tensors().values())


@every_option
def test_the_default_dtype_of_torch_changes_no_byte(fmt: Format, options: dict[str, str]) -> None:
    w = torch.cat([normal(8, 256), torch.zeros(8, 256, dtype=torch.bfloat16)])
    q = quantized(fmt, w, options)
    decoded = fmt.dequantize(q)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_bytes(quantized(fmt, w, options), q)
        assert fmt.dequantize(q).dtype == torch.float32
        assert torch.equal(fmt.dequantize(q), decoded)
    finally:
        torch.set_default_dtype(torch.float32)


@every_option
def test_a_fused_set_shares_a_scale_that_the_format_has_one_of_and_nothing_else(
    fmt: Format, options: dict[str, str]
) -> None:
    gate, up = normal(2, 8, 256), normal(2, 16, 256, seed=1)
    up[1] *= 32
    fused = fmt.quantize_fused(
        [gate, up],
        options,
        names=["gate", "up"],
        mean_squares=mean_squares(options, [gate, up]),
    )
    alone = [quantized(fmt, w, options) for w in (gate, up)]
    if not (fmt.has_global_scale or fmt.shares_scale):
        assert_same_bytes(fused[0], alone[0])
        assert_same_bytes(fused[1], alone[1])
        return
    shared = [
        q.global_scale if fmt.has_global_scale else q.scale[..., 0, 0] for q in (*fused, *alone)
    ]
    larger = torch.maximum(*shared[2:])
    assert torch.equal(shared[0], larger)
    assert torch.equal(shared[1], larger)
    for w, q in zip((gate, up), fused, strict=True):
        again = fmt._quantize_in_tiles(
            w.float(), fmt.resolve_options(options), larger, importance(options, w.shape[-1])
        )
        assert_same_bytes(again, q)


@every_format
def test_an_error_in_a_fused_set_names_its_member(fmt: Format) -> None:
    bad = normal(8, 256)
    bad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"^up: nan"):
        fmt.quantize_fused([normal(8, 256), bad], names=["gate", "up"])
    with pytest.raises(UnsupportedError, match="gate and up: shapes"):
        fmt.quantize_fused([normal(8, 256), normal(2, 8, 256)], names=["gate", "up"])
