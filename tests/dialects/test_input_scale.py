"""What a static scale of an input may be, and whose it is by its name."""

from __future__ import annotations

import math

import pytest

from moequant.dialects import REGISTRY
from moequant.dialects.input_scale import InputScale

SCALES = [
    (dialect, format)
    for dialect in REGISTRY.values()
    for format, scheme in dialect.schemes.items()
    if scheme.input_scale is not None
]


@pytest.mark.parametrize(
    ("stored", "multiplies", "divides"),
    [
        (0.5, True, True),
        (0.0, False, False),
        (-0.5, False, False),
        (math.nan, False, False),
        (math.inf, False, False),
        (-math.inf, False, False),
        # Its reciprocal is larger than every float32.
        (1e-39, True, False),
    ],
)
def test_a_scale_is_positive_and_finite_as_a_multiplier(stored, multiplies, divides):
    assert InputScale(suffix="s").is_usable(stored) is multiplies
    assert InputScale(suffix="s", divides=True).is_usable(stored) is divides


@pytest.mark.parametrize(("dialect", "format"), SCALES, ids=lambda v: getattr(v, "name", v))
def test_the_module_of_a_scale_is_that_which_names_it(dialect, format):
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        module = f"model.layers.3.mlp.experts.7.{leaf}"
        name = dialect.input_scale(format).name_of(module)
        assert dialect.module_of_scale(name) == module
    other = "model.layers.3.self_attn.o_proj"
    assert dialect.input_scale(format).name_of(other).rpartition(".")[0] == other


@pytest.mark.parametrize(("dialect", "format"), SCALES, ids=lambda v: getattr(v, "name", v))
def test_of_fp8_inputs_the_largest_of_a_layer_counts_and_of_fp4_inputs_each(dialect, format):
    assert dialect.input_scale(format).of_layer is (format != "nvfp4")
