"""Weights that a format would destroy: zeros, or noise, in the place of an expert.

A weight is refused if its relative error is more than `LIMIT` times that of Gaussian weights. Where
the scale of a block is in the format's range, its largest weight is rounded to within its own step,
and others are off by half the smallest step at most. That is worst in a group of 128 of INT4: one
weight of 7 steps beside 127 of just less than half a step gives sqrt(127/4 / (127/4 + 49)) = 63 %,
5.9 times the error of Gaussian weights. The worst found is 58 % there, 41 % in MXFP4, 19 % in NVFP4
and 6 % in FP8 blocks. So outliers pass, and beyond the limit are only weights for which the format
has no scale: they are far smaller than weights that share their global scale, or smaller than the
smallest scale. A conversion looks at the scales, which costs next to nothing, and measures the
error of weights with a scale at the lower end of the range. In `fp8_tensor` two matrices share a
scale that says nothing of the smaller one, so it looks at their codes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moequant.errors import NumericsError
from moequant.formats import get_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.formats import QuantizedWeight, StoredWeight
    from moequant.quantizers import Quantizer

LIMIT = 6.0
"""Times the relative error of Gaussian weights."""


def check_underflow(
    format: str,
    names: Sequence[str],
    *,
    weights: Sequence[StoredWeight],
    quantized: Sequence[QuantizedWeight],
    quantizer: Quantizer,
) -> None:
    """Refuse a weight that `format` destroys, of those that were quantized together.

    Raises:
        NumericsError: names the weight and its error.
    """
    for name, before, after in zip(names, weights, quantized, strict=True):
        if get_format(format).underflows(after):
            signal, noise = quantizer.compare(before, after)
            if reason := beyond_limit(format, math.sqrt(signal), math.sqrt(noise)):
                raise NumericsError(
                    f"{name}: {reason}. It is too small for the scales of the format, or compared "
                    "with weights that share its global scale. Keep the experts of its layer "
                    '(format = "keep" in a recipe), or choose another format'
                )


def beyond_limit(format: str, signal: float, noise: float) -> str | None:
    """Why a weight of these norms, itself and its error, is destroyed in a format; None if not."""
    ordinary = get_format(format).ordinary_error
    if not ordinary or noise <= LIMIT * ordinary * signal:
        return None
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return f"has NaN or infinity, itself or where it is decoded from {format}"
    error = f"{noise / signal:.0%}" if signal else "all"
    return (
        f"off by {error} in {format}; ordinary weights are off by {ordinary:.1%}, and the limit is "
        f"{LIMIT * ordinary:.0%}"
    )
