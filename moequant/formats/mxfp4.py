"""MXFP4: E2M1 weights with one E8M0 scale, a power of two, per 32 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats.blocks import weighted_group_sum
from moequant.formats.e8m0 import E8m0Format
from moequant.formats.elements import (
    E2M1,
    E8M0_BIAS,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e8m0,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Mxfp4(E8m0Format):
    """`w = qdata * scale`; option `scale_rule` computes the scale's exponent from amax.

    | rule | exponent | largest weight / scale | relative error, N(0, 0.02) |
    |---|---|---|---|
    | even | floor(log2(amax)) - 2, plus 1 if amax has a mantissa >= 1.75 | below 7 | 11.2 % |
    | floor | floor(log2(amax)) - 2 | below 8 | 11.4 % |
    | ceil | ceil(log2(amax / 6)) | 6 | 11.8 % |
    | mse | even's exponent or one less, whichever has less squared error | below 14 | 11.1 % |

    "floor" is the conversion of OCP Microscaling Formats v1.0, section 6.3; "even" is what
    compressed-tensors and vLLM use, "ceil" Model-Optimizer. "mse" keeps even's exponent on a tie.

    `search = "weighted"` takes the rule's exponent or one less (of "mse" those of "even"),
    whichever has less squared error, each error counted by the mean square of its input channel.

    Rules: round to nearest, ties to the even code; beyond +-6 saturates; a zero group has scale 1
    (byte 127) and zero codes; exponents are clamped to -127..127, so that byte 255, NaN, is never
    written; a zero keeps its sign (code 8 is -0), as does a negative weight that rounds to zero;
    weights beyond +-1.5 * 2**127, the largest this format holds in a float32, saturate at that
    value.

    Error: at most half a step of E2M1, times scale, under "even" and "ceil"; "floor" may clip an
    amax of 8 to 6, in units of the scale; "mse" exceeds this bound to reduce the sum of squares.
    """

    name = "mxfp4"
    summary = "FP4 E2M1, one power-of-two E8M0 scale per 32 columns, weight only"
    element = E2M1
    ordinary_error = 0.1126
    # OCP's rule, 2**(floor(log2(amax)) - 2); others clip less.
    reach = (-8.0, 8.0)
    options = {  # noqa: RUF012
        "scale_rule": ("even", "floor", "ceil", "mse"),
        "search": ("none", "weighted"),
    }
    warned_options = {  # noqa: RUF012
        ("scale_rule", "mse"): "from 0.265 to 0.278"
    }

    def _exponent(
        self, groups: Tensor, options: Mapping[str, str], importance: Tensor | None
    ) -> Tensor:
        rule = options["scale_rule"]
        exponent = self._exponent_by_rule(groups, "even" if rule == "mse" else rule)
        if rule == "mse" or options["search"] != "none":
            return _least_squares(groups, exponent, importance)
        return exponent


def _least_squares(groups: Tensor, exponent: Tensor, importance: Tensor | None) -> Tensor:
    """For each group, `exponent` or one less, whichever has the smaller squared error.

    A tie keeps `exponent`. A larger exponent is never better: amax / scale is below 7 under rule
    "even", and in that range the values of the next exponent are a subset of these.

    Args:
        groups: [..., N, K / 32, 32] float32.
        exponent: [..., N, K / 32] int32, by the rule.
        importance: [K] float32, or None for equal ones.
    """
    # In units of the scale, squares neither overflow nor underflow.
    x = groups / decode_e8m0(encode_e8m0(exponent))[..., None]
    lower = _squared_error(x, 0.5, importance) < _squared_error(x, 1.0, importance)
    less = lower & (exponent > -E8M0_BIAS)
    return torch.where(less, exponent - 1, exponent)


def _squared_error(x: Tensor, scale: float, importance: Tensor | None) -> Tensor:
    """Squared error of each group of `x` under `scale`: [..., N, K / 32]."""
    squares = decode_e2m1(encode_e2m1(x / scale)).mul_(scale).sub_(x).square_()
    return weighted_group_sum(squares, importance)
