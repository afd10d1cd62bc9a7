"""How `moequant bench serve` starts an engine, and the lengths of what is timed.

Decoding: each sequence is a prompt of PROMPT_TOKENS, and two calls are timed: one with FIRST_TOKENS
new tokens, and one with a number of steps more. Prefill: PREFILL_PROMPTS prompts of one length, and
one new token each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.runtime.activations import ActivationsChoice

PROMPT_TOKENS = 64
FIRST_TOKENS = 16
"""New tokens of the shorter of two calls, whose difference is decoding alone."""
PREFILL_PROMPTS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine is started.

    Attributes:
        checkpoint: a folder.
        device: "cuda", or "cpu" for transformers and moequant.
        activations: of our experts, see `FusedExperts`.
        batches: numbers of sequences that are decoded at once.
        steps: decoding steps that are timed.
        prefill_tokens: tokens of all prompts of a prefill, a multiple of PREFILL_PROMPTS.
        attention_backend: of vLLM; None for its choice.
        tensor_parallel: number of GPUs, in vLLM only.
        expert_parallel: whether these divide experts, and not their rows.
    """

    checkpoint: str
    device: str
    activations: ActivationsChoice
    batches: Sequence[int]
    steps: int
    prefill_tokens: int
    attention_backend: str | None
    tensor_parallel: int
    expert_parallel: bool

    @property
    def prefill_length(self) -> int:
        """Tokens of each prompt of a prefill."""
        return self.prefill_tokens // PREFILL_PROMPTS

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sequence, prompt and answer, whether it is decoded or only read."""
        return max(decoded_length(self.steps), self.prefill_length + 1)


def decoded_length(steps: int) -> int:
    """Tokens of a sequence that is decoded, prompt and answer, in the longer of the two calls."""
    return PROMPT_TOKENS + FIRST_TOKENS + steps


def mean_context(steps: int) -> float:
    """Tokens before a decoding step, as a mean over those that are timed."""
    return PROMPT_TOKENS + FIRST_TOKENS + steps / 2
