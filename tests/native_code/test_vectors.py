from __future__ import annotations

import re

import pytest
import torch

from moequant.formats import CONVERTIBLE
from moequant.native_code import jit
from moequant.native_code.vectors import F32, F64, I32, I64, Type
from moequant.quantizers.elements import Source
from moequant.quantizers.encoded import Encoded
from moequant.quantizers.kernels import amax, quantizing_kernel
from moequant.quantizers.operands import new_kernel, operand_of


@pytest.mark.parametrize("stored", [Source("bfloat16"), Encoded("nvfp4", "w_")])
@pytest.mark.parametrize("fmt", CONVERTIBLE.values(), ids=CONVERTIBLE)
def test_kernels_round_as_ieee_754_says(fmt, stored):
    text = quantizing_kernel(fmt, stored, fmt.resolve_options()).text()
    operations = re.findall(r"= (f(?:add|sub|mul|div)\b[^<\n]*?)(?:<|float)", text)
    assert operations
    # A fast-math flag would stand between the name and the type.
    assert {operation.strip() for operation in operations} <= {"fadd", "fsub", "fmul", "fdiv"}
    assert "fma" not in text


NONE = (0, 0, 0, 0.0)


def test_operands_of_two_types_are_a_mistake():
    f = new_kernel()
    one, other = f.constant(Type("i32", 4), 1), f.constant(Type("i32", 8), 1)
    with pytest.raises(AssertionError):
        one + other
    with pytest.raises(AssertionError):
        f.variable(one).set(other)
    with pytest.raises(AssertionError):
        one / 2


def test_doubles_hold_squares_of_floats():
    f = new_kernel()
    wide = f.constant(F32, 3e38).to("double")
    f.store(wide * wide, f.parameter("scratch"), f.constant(I64, 0))
    f.store(f.constant(F64, 0.1), f.parameter("scratch"), f.constant(I64, 1))
    f.give(f.constant(I32, 0))
    found = torch.empty(2, dtype=torch.float64)
    jit.compile_function(f)(*NONE, 0, 0, *NONE, found.data_ptr(), 0)
    assert found.tolist() == [torch.tensor(3e38).double().item() ** 2, 0.1]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1001])
def test_strips_cover_every_number_once(count):
    f = new_kernel()
    seen = f.parameter("qdata")
    for lanes, loop in f.strips(f.constant(I64, 0), f.parameter("rows"), 8):
        with loop as at:
            f.store(f.load(Type("i32", lanes), seen, at) + 1, seen, at)
    f.give(f.constant(I32, 0))
    times = torch.zeros(count + 8, dtype=torch.int32)
    jit.compile_function(f)(*NONE, count, 1, times.data_ptr(), *NONE[1:], 0, 0)
    assert times.tolist() == [1] * count + [0] * 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 300])
def test_amax_is_the_largest_magnitude(dtype, count):
    w = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    kernel = jit.compile_function(amax(Source(dtype)))
    bits = kernel(*operand_of(w).arguments(), count, 1, *NONE, 0, 0)
    as_integer = torch.int32 if dtype == "float32" else torch.int16
    largest = torch.tensor([bits], dtype=as_integer).view(w.dtype).item()
    assert largest == (w.abs().max().item() if count else 0)


def test_numbers_are_stored_as_they_are():
    f = new_kernel()
    for place, number in enumerate((0.1, -0.0, 2.0**-149, float("inf"))):
        f.store(f.constant(F32, number), f.parameter("qdata"), f.constant(I64, place))
    f.give(f.constant(I32, 7))
    found = torch.empty(4)
    assert jit.compile_function(f)(*NONE, 0, 0, found.data_ptr(), *NONE[1:], 0, 0) == 7
    wanted = torch.tensor([0.1, -0.0, 2.0**-149, float("inf")])
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_prefetching_changes_nothing_also_where_there_is_no_memory():
    f = new_kernel()
    for place in (0, 1 << 40, -(1 << 40)):
        f.prefetch(f.parameter("qdata"), f.constant(I64, place), "float")
    f.give(f.constant(I32, 7))
    numbers = torch.arange(4.0)
    assert jit.compile_function(f)(*NONE, 0, 0, numbers.data_ptr(), *NONE[1:], 0, 0) == 7
    assert numbers.tolist() == [0, 1, 2, 3]
