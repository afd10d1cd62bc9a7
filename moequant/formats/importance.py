"""How much the error of each column of a weight counts in a weighted search for scales.

With y = W x the mean square of an output's error, for independent channels of x, is the sum over
columns of the squared weight error times the mean square of x. So the search needs one number a
column, and only ratios of them matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import StatisticsError

if TYPE_CHECKING:
    from torch import Tensor


def importance_of(mean_square: Tensor, K: int, name: str = "weight") -> Tensor:
    """The mean squares of a weight's input channels, over the largest of them.

    Equal mean squares become 1, so that weighting changes no bit of an unweighted error; so do mean
    squares that are all 0.

    Args:
        mean_square: [K] float32, not negative.
        K: columns of the weight.
        name: name of the weight for error messages.

    Returns:
        [K] float32, 0 to 1, on the CPU.

    Raises:
        StatisticsError: another shape or dtype, or a number that is negative, NaN or Inf.
    """
    if mean_square.shape != (K,) or mean_square.dtype != torch.float32:
        raise StatisticsError(
            f"{name}: mean squares of its inputs are {mean_square.dtype} "
            f"{list(mean_square.shape)}, but must be torch.float32 [{K}]"
        )
    if not bool((mean_square.isfinite() & (mean_square >= 0)).all()):
        wrong = mean_square[~(mean_square.isfinite() & (mean_square >= 0))][0].item()
        raise StatisticsError(
            f"{name}: a mean square of its inputs is {wrong}, but must be finite and not negative; "
            "calibrate again"
        )
    largest = mean_square.amax() if K else mean_square.sum()
    return torch.where(largest > 0, mean_square / largest, 1.0)
