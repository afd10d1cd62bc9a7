from __future__ import annotations

import pytest
import torch

from moequant.storage.buffers import tensor_bytes
from moequant.storage.headers import dtype_name
from moequant.verification.differences import find_difference


def compare(found, wanted, chunk=None):
    views = tensor_bytes(found), tensor_bytes(wanted)
    size = chunk or max(views[0].nbytes, 1)
    pairs = [
        (views[0][i : i + size], views[1][i : i + size]) for i in range(0, views[0].nbytes, size)
    ]
    return find_difference(pairs, dtype_name(found.dtype), found.shape)


def test_equal_bytes_do_not_differ():
    t = torch.randn(3, 5).bfloat16()
    assert compare(t, t.clone()) is None


@pytest.mark.parametrize("shape", [(0, 4), (0,)])
def test_empty_tensors_do_not_differ(shape):
    assert compare(torch.empty(shape), torch.empty(shape)) is None


def test_negative_zero_is_not_zero():
    difference = compare(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 0.0]))
    assert "element [1] is -0 (0x80000000), expected 0 (0x00000000)" in difference


@pytest.mark.parametrize("chunk", [None, 8, 24])
def test_the_first_differing_element_is_named_and_all_are_counted(chunk):
    wanted = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    found = wanted.clone()
    found[1, 0, 2], found[1, 2, 3] = 0.5, 0.25
    difference = compare(found, wanted, chunk)
    assert difference == (
        "element [1, 0, 2] is 0.5 (0x3f000000), expected 14 (0x41600000); 2 of 24 elements differ"
    )


def test_codes_are_shown_as_bits():
    difference = compare(torch.tensor([7, 0x8F]).byte(), torch.tensor([7, 0x7F]).byte())
    assert difference.startswith("element [1] is 0x8f, expected 0x7f;")


def test_a_scalar_is_element_of_nothing():
    assert compare(torch.tensor(1.0), torch.tensor(2.0)).startswith("element [] is 1 ")


def test_dtypes_below_a_byte_are_compared_by_the_byte():
    difference = find_difference([(memoryview(b"\x12\x34"), memoryview(b"\x12\x35"))], "F4", (4,))
    assert difference == "byte 1 is 0x34, expected 0x35; 1 of 2 elements differ"
