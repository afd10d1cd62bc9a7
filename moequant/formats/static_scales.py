"""Static scales of activations, which come with the weights and are not computed for each token.

A scale multiplies: activations are code * scale, or for NVFP4, code * scale of the group * scale.
It is the largest magnitude of the activations over the largest that a scale of 1 holds, which the
format says: 2688 = 6 * 448 for NVFP4. What is larger saturates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moequant.errors import StatisticsError
from moequant.formats.elements import divide

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats.base import Format

LEAST_STATIC_SCALE, LARGEST_STATIC_SCALE = 2.0**-117, 2.0**117
"""Scales lie between these, so that their reciprocals, and the products of both with scales of
groups from 2**-9 to 448, are normal float32."""


def static_scale_of(format: Format, amax: float, name: str) -> Tensor:
    """The static scale of activations whose largest magnitude is `amax`.

    Args:
        format: of the weights that multiply them; one with `static_activations`.
        amax: as measured.
        name: of the weight, for messages.

    Returns:
        [] float32.

    Raises:
        StatisticsError: `amax` is not positive and finite, or the scale out of range.
    """
    if not (math.isfinite(amax) and amax > 0):
        raise StatisticsError(
            f"{name}: the largest magnitude of its inputs is {amax:g}, but a static scale needs a "
            "positive finite one; calibrate with more text, or give the scale as a number"
        )
    scale = divide(torch.tensor(amax, dtype=torch.float32), format.static_largest)
    check_static_scale(scale.item(), name)
    return scale


def check_static_scale(scale: float, name: str | None) -> None:
    """Check that engines can use a static scale.

    Args:
        scale: of activations.
        name: of the weight that multiplies these, for messages; None if a user gave the scale for
            all weights.

    Raises:
        StatisticsError: it is out of range.
    """
    if not LEAST_STATIC_SCALE <= scale <= LARGEST_STATIC_SCALE:
        what = "the scale" if name is None else f"{name}: the static scale of its input"
        remedy = "give another" if name is None else "calibrate again, or correct it"
        raise StatisticsError(
            f"{what} is {scale:g}, but must be from {LEAST_STATIC_SCALE:g} to "
            f"{LARGEST_STATIC_SCALE:g}; {remedy}"
        )
