"""Generate from a prompt with a transformers model, and time it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.integrations.transformers import import_transformers
from moequant.runtime.load import open_reader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_NO_TOKENS = "the prompt has no tokens; give at least one"

_MIN_TEMPERATURE = 1e-6
"""Logits are divided by the temperature; far below this they overflow."""

# The files that may hold the vocabulary; without one, transformers returns an empty tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What was generated.

    Attributes:
        ids: the new tokens, including an end-of-text token if one ended the generation.
        first_token_s: seconds to the first new token, which includes reading the prompt.
        tokens_per_s: rate after the first token; None if there is only one.
    """

    ids: list[int]
    first_token_s: float
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Converts prompts to token ids, and ids to text.

    Attributes:
        folder: the converted checkpoint.
        vocabulary: number of token ids of the model.
    """

    folder: Path
    vocabulary: int

    @classmethod
    def of(cls, checkpoint: str | Path, architecture: str | Path | None = None) -> Prompts:
        """Prompts for a converted checkpoint, or for the checkpoint of a prepared folder.

        `architecture` is a file as for `load_experts`.

        Raises:
            CheckpointError: neither of the two, or config.json gives no vocabulary size.
            UnsupportedError: an unknown architecture or quantization.
        """
        opened = open_reader(checkpoint, torch.device("cpu"), architecture).converted.checkpoint
        config = opened.config
        if "vocab_size" not in config and isinstance(config.get("text_config"), dict):
            config = config["text_config"]
        vocabulary = config.get("vocab_size")
        if type(vocabulary) is not int or vocabulary < 1:
            raise CheckpointError(
                f"{opened.path / 'config.json'}: vocab_size is {vocabulary!r}, but must be a "
                "positive integer; fetch the checkpoint again"
            )
        return cls(folder=opened.path, vocabulary=vocabulary)

    def check(self, ids: Sequence[int]) -> None:
        """Check that there are ids, and that all are in the vocabulary.

        Raises:
            UnsupportedError: there are none, or one is outside the vocabulary.
        """
        if not ids:
            raise UnsupportedError(_NO_TOKENS)
        for id_ in ids:
            if not 0 <= id_ < self.vocabulary:
                raise UnsupportedError(
                    f"prompt id {id_} is not in the vocabulary of {self.folder}; use ids from 0 to "
                    f"{self.vocabulary - 1}"
                )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer adds.

        Raises:
            UnsupportedError: there is no tokenizer, transformers cannot read it, or the text has
                no tokens.
        """
        ids = list(self._tokenizer(text)["input_ids"])
        self.check(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens; raises as `encode`."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        transformers = import_transformers()
        if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UnsupportedError(
                f"{self.folder}: no tokenizer; copy the model's tokenizer files there, or give "
                "token ids"
            )
        try:
            return transformers.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        # The errors of tokenizers have no common base class.
        except Exception as error:
            raise UnsupportedError(
                f"{self.folder}: transformers {transformers.__version__} cannot read the "
                f"tokenizer: {error}; copy the model's tokenizer files there, or give token ids"
            ) from error


def generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Generation:
    """Continue a prompt.

    On a CUDA device two tokens are generated first and discarded, so that compiling kernels and
    packing weights is not timed.

    Args:
        model: a model that generates, such as `load_model` returns.
        prompt: at least one token id, all in the vocabulary (see `Prompts.check`).
        max_new_tokens: maximum number of new tokens, at least 1; an end-of-text token stops early.
        temperature: 0 takes the likeliest token (greedy); from 1e-6 on, tokens are sampled with the
            other settings of generation_config.json, such as top_p.
        seed: 64-bit seed of the sampling; results repeat on the same machine.

    Raises:
        UnsupportedError: an empty prompt, `max_new_tokens` below 1, or an invalid temperature or
            seed.
    """
    if not prompt:
        raise UnsupportedError(_NO_TOKENS)
    if max_new_tokens < 1:
        raise UnsupportedError(f"max_new_tokens is {max_new_tokens}, but must be at least 1")
    if temperature != 0 and not _MIN_TEMPERATURE <= temperature < float("inf"):
        raise UnsupportedError(
            f"temperature is {temperature}, but must be 0 or at least {_MIN_TEMPERATURE:g}"
        )
    if not 0 <= seed < 1 << 64:
        raise UnsupportedError(f"seed is {seed}, but must be from 0 to 2**64 - 1")
    ids = torch.tensor([list(prompt)], device=model.device)
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        _run(model, ids, 2, temperature)
    with torch.random.fork_rng([model.device] if on_cuda else []):
        torch.manual_seed(seed)
        output, started, times = _run(model, ids, max_new_tokens, temperature)
    new = output[0, ids.shape[1] :].tolist()
    later_s = times[-1] - times[0]
    return Generation(
        ids=new,
        first_token_s=times[0] - started,
        tokens_per_s=(len(new) - 1) / later_s if len(new) > 1 else None,
    )


def _run(
    model: PreTrainedModel, ids: Tensor, max_new_tokens: int, temperature: float
) -> tuple[Tensor, float, list[float]]:
    """Output, start time, and time of each token, in seconds of `time.perf_counter`."""
    times: list[float] = []

    class Clock(import_transformers().StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: Any) -> Tensor:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize(input_ids.device)
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    sampling = {"do_sample": True, "temperature": temperature}
    # None removes the sampling settings of generation_config.json; transformers warns about them.
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        stopping_criteria=[Clock()],
        **(sampling if temperature else greedy),
    )
    assert isinstance(output, torch.Tensor)
    return output, started, times
