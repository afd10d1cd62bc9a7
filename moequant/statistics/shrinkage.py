"""How statistics of an expert that saw few tokens are drawn toward those of its layer.

The rule, for the mean square of a channel, the second moment of two channels, and amax alike:

    shrunk = (tokens * own + prior_tokens * pooled) / (tokens + prior_tokens)

`tokens` is how many the expert saw. This is the mean after `prior_tokens` more tokens that look
like the layer's. A mean square over n tokens has a relative variance of about k / n, where k, the
variance of x * x over its squared mean, is 2 for Gaussian channels and more for heavy tails; the
pooled one is off by how much experts differ, with a relative variance of v. The mean squared error
is least with the weights n and k / v, so `prior_tokens` is k / v. An expert without tokens gets the
pooled statistics.

What "pooled" is, depends on the input:

* Hidden states, which gate and up multiply, are the same channels for every expert of a layer. The
  pooled ones are those of all tokens that were routed, once for each expert that a token went to.
* A channel of the intermediate, which down multiplies, is a neuron of one expert, and has nothing
  to do with the channel of the same index in another. Averaged over the tokens of all experts and
  over channels, only the scale is left: every channel gets that, and pairs of channels get 0.

The pooled amax is the largest of all experts: a maximum over few tokens is too small, and clipping
costs more than a scale that is too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

PRIOR_TOKENS = 64
"""Tokens that the pooled statistics count for, unless the caller says otherwise."""


def shrink(own: Tensor, pooled: Tensor, *, tokens: int, prior_tokens: int) -> Tensor:
    """Statistics of an expert, drawn toward the pooled ones.

    Multiplications, one addition and one division in float64, each rounded as IEEE 754 says: the
    same bits everywhere.

    Args:
        own: [...] float32, on the CPU, as measured over `tokens`.
        pooled: [...] float32, of the expert's layer.
        tokens: how many the expert saw.
        prior_tokens: how many the pooled statistics count for, at least 1.

    Returns:
        [...] float32.
    """
    assert prior_tokens > 0, prior_tokens
    if tokens == 0:
        return pooled.clone()
    # In place, because second moments are large.
    weighted = own.double().mul_(tokens).add_(pooled.double().mul_(prior_tokens))
    return weighted.div_(tokens + prior_tokens).to(torch.float32)
