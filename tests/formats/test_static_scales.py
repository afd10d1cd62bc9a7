"""Static scales of activations from their largest magnitude."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moequant.errors import StatisticsError
from moequant.formats import get_format, static_scale_of

LARGEST = {"nvfp4": 448 * 6, "fp8_tensor": 448}


@pytest.mark.parametrize(("format", "largest"), LARGEST.items())
@pytest.mark.parametrize("amax", [1.0, 3.1, 2688.0, 1e-6, 7e4])
def test_a_scale_is_the_magnitude_over_the_largest_that_codes_hold(format, largest, amax):
    scale = static_scale_of(get_format(format), amax, "w")
    assert scale.shape == ()
    assert scale.item() == np.float32(amax) / np.float32(largest)


@pytest.mark.parametrize("amax", [0.0, -1.0, math.nan, math.inf])
def test_a_magnitude_that_is_not_positive_and_finite_is_refused_by_name(amax):
    said = f"^experts.3.down: the largest magnitude of its inputs is {amax:g}, but"
    with pytest.raises(StatisticsError, match=said):
        static_scale_of(get_format("nvfp4"), amax, "experts.3.down")


def test_a_scale_whose_products_would_not_be_normal_numbers_is_refused():
    with pytest.raises(StatisticsError, match=r"the static scale of its input is .* must be from"):
        static_scale_of(get_format("nvfp4"), 2.0**-106, "w")
