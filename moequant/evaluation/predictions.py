"""Compare what two models predict, position by position, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CHUNK_BYTES = 16 << 20
"""Of logits in float64 that are compared at once."""
CHUNK_COPIES = 8
"""Tensors of that size that exist at once: of both models logits, their logarithms of
probabilities and a sum's temporaries; probabilities, a difference and a product."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A test's predictions beside its reference's, in windows of S tokens.

    Attributes:
        kl: [W, S] float64: KL(reference || test) in nats, of the prediction at each position.
        nll_reference: [W, S - 1] float64: -ln p(next token), without the last position, whose next
            token is not there.
        nll_test: the same of the test.
        same_top: [W, S] bool: whether both have the same most probable token.
    """

    kl: Tensor
    nll_reference: Tensor
    nll_test: Tensor
    same_top: Tensor

    @classmethod
    def join(cls, parts: Sequence[Predictions]) -> Predictions:
        """Those of all windows."""
        fields = ("kl", "nll_reference", "nll_test", "same_top")
        return cls(**{name: torch.cat([getattr(p, name) for p in parts]) for name in fields})


def compare(reference: Tensor, test: Tensor, ids: Tensor) -> Predictions:
    """Compare the logits [S, V] that two models have for a window of token ids [S].

    The logits are finite, of any floating dtype. The result is on the CPU.
    """
    vocabulary = reference.shape[1]
    rows = max(CHUNK_BYTES // (8 * vocabulary), 1)
    following = torch.cat([ids[1:], ids[:1]]).to(reference.device)  # the last one is not used
    kl, nll_reference, nll_test = [], [], []
    for r, t, next_ids in zip(
        *(torch.split(one, rows) for one in (reference, test, following)), strict=True
    ):
        p, q = r.double().log_softmax(-1), t.double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        nll_reference.append(-p.gather(-1, next_ids[:, None])[:, 0])
        nll_test.append(-q.gather(-1, next_ids[:, None])[:, 0])
    return Predictions(
        kl=torch.cat(kl).cpu()[None],
        nll_reference=torch.cat(nll_reference)[:-1].cpu()[None],
        nll_test=torch.cat(nll_test)[:-1].cpu()[None],
        same_top=(reference.argmax(-1) == test.argmax(-1)).cpu()[None],
    )
