import math

import pytest
import torch

from moequant.storage.headers import TensorInfo, dtype_name
from moequant.weights.finite import find_not_finite

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def found(values, offset_bytes=0, shape=None):
    shape = tuple(values.shape) if shape is None else shape
    info = TensorInfo("w", dtype_name(values.dtype), shape, "", 0, values.nbytes)
    return find_not_finite(values.flatten().view(torch.uint8), info, offset_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1234, 4095])
def test_one_element_that_is_not_finite_is_named_with_its_place(dtype, value, at):
    values = torch.randn(64, 64).to(dtype)
    values.view(-1)[at] = value
    assert found(values) == f"w: {value} at index [{at // 64}, {at % 64}]"


def test_complex_numbers_count_by_either_part():
    values = torch.zeros(4, dtype=torch.complex64)
    assert found(values) is None
    values[2] = complex(0, math.inf)
    assert found(values).endswith("at index [2]")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_place_counts_from_the_begin_of_the_tensor(dtype):
    part = torch.zeros(8, dtype=dtype)
    part[3] = math.nan
    assert found(part, 16 * dtype.itemsize, (4, 8)) == "w: nan at index [2, 3]"


def test_the_place_counts_from_the_begin_of_a_large_part():
    part = torch.zeros(3, 1 << 16, dtype=torch.bfloat16)
    part[2, 5] = -math.inf
    assert found(part) == "w: -inf at index [2, 5]"


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_that_cancel_are_found(dtype):
    assert found(torch.tensor([1.0, math.inf, -math.inf], dtype=dtype)) == "w: inf at index [1]"


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_sum_overflows_are_finite(dtype):
    assert found(torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)) is None


def test_a_scalar_and_an_empty_tensor_have_no_surprises():
    assert found(torch.tensor(math.inf)) == "w: inf"
    assert found(torch.empty(0, 4)) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_codes_are_not_looked_at(dtype):
    assert found(torch.full((64,), 255, dtype=torch.uint8).view(dtype)) is None
