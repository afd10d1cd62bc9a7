"""Round a block of columns one after the other: the part of GPTQ that is no product of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moequant.formats.elements import Element

RoundColumns = Callable[["Element", Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Called as `round_columns_in_torch`."""

COLUMNS = 64
"""Most columns of a block."""


def round_columns_in_torch(
    element: Element,
    target: Tensor,
    scale: Tensor,
    codes: Tensor,
    errors: Tensor,
    feedback: Tensor,
) -> None:
    """Round a block of columns; all tensors are on one device, and contiguous but for `feedback`.

    Args:
        element: what a code is.
        target: [B, N] float64, the transposed columns with the errors of all earlier blocks added;
            may be overwritten.
        scale: [B, N] float64, what each code is multiplied by.
        codes: [B, N] uint8, the result, one code in each byte.
        errors: [B, N] float64; the columns of the weight, from which what they are rounded to is
            subtracted.
        feedback: [B, B] float64 of any strides, how much of the error of a column (second index) is
            added to one that follows (first index).
    """
    feedback = feedback.contiguous()
    for k in range(len(target)):
        code = element.encode((target[k] / scale[k]).float())
        codes[k] = code.view(torch.uint8)
        errors[k] -= element.decode(code).double() * scale[k]
        target[k + 1 :].addr_(feedback[k + 1 :, k], errors[k])
