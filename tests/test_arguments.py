"""Arguments of callers are checked before torch sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moequant.arguments import check_count, check_flag, check_tensor, whole_number
from moequant.errors import UnsupportedError


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_integers_of_any_library_are_counts(value):
    assert check_count("rows", value, 1) == 3


@pytest.mark.parametrize("value", [0, -1, 1.0, True, torch.tensor(True), "3", None])
def test_what_is_no_count_is_refused(value):
    with pytest.raises(UnsupportedError, match="must be a whole number, at least 1"):
        check_count("rows", value, 1)


@pytest.mark.parametrize("value", [True, 1.5, np.bool_(True)])
def test_a_truth_value_is_no_whole_number(value):
    with pytest.raises(TypeError):
        whole_number(value)


def test_what_is_no_dense_tensor_is_refused():
    check_tensor("w", torch.zeros(2, 3))
    with pytest.raises(UnsupportedError, match=r"w is list, but must be a tensor \[N, K\]"):
        check_tensor("w", [1.0], "[N, K]")
    with pytest.raises(UnsupportedError, match="must be a dense tensor"):
        check_tensor("w", torch.zeros(2, 2).to_sparse())
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.zeros(2)])
    with pytest.raises(UnsupportedError, match="w is nested, but must be a dense tensor"):
        check_tensor("w", nested)


@pytest.mark.parametrize("value", [1, 0, None, "False"])
def test_what_is_no_truth_value_is_no_flag(value):
    assert check_flag("gated", False) is False
    with pytest.raises(UnsupportedError, match=r"gated is .*, but must be True or False"):
        check_flag("gated", value)
