"""Generate from a prompt with a model of transformers, and say how fast it went."""

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


_NO_TOKENS = "the prompt holds no tokens; give at least one"

_COLDEST = 1e-6
"""Logits are divided by the temperature: far below, they overflow."""

# One of these holds the vocabulary; without, transformers makes up a tokenizer that knows nothing.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What was generated.

    Attributes:
        ids: the new tokens, the last of them one that ends a text where one came.
        first_token_s: seconds to the first of them, which reads the prompt.
        tokens_per_s: of those behind the first; None where there are none.
    """

    ids: list[int]
    first_token_s: float
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What turns prompts into ids, and ids into text.

    Attributes:
        folder: the converted checkpoint.
        vocabulary: how many ids the model knows.
    """

    folder: Path
    vocabulary: int

    @classmethod
    def of(cls, checkpoint: str | Path, architecture: str | Path | None = None) -> Prompts:
        """Those of a converted checkpoint, or of the one that a prepared folder lies in.

        A file `architecture` is taken as `load_experts` does.

        Raises:
            CheckpointError: it is neither, or its config.json gives no size of the vocabulary.
            UnsupportedError: an architecture or a quantization we do not know.
        """
        opened = open_reader(checkpoint, torch.device("cpu"), architecture).converted.checkpoint
        config = opened.config
        if "vocab_size" not in config and isinstance(config.get("text_config"), dict):
            config = config["text_config"]
        vocabulary = config.get("vocab_size")
        if type(vocabulary) is not int or vocabulary < 1:
            raise CheckpointError(
                f"{opened.path / 'config.json'}: vocab_size is {vocabulary!r}, but a number of ids "
                "is wanted; fetch the checkpoint again"
            )
        return cls(folder=opened.path, vocabulary=vocabulary)

    def check(self, ids: Sequence[int]) -> None:
        """Refuse ids that the model does not know.

        Raises:
            UnsupportedError: none at all, or one outside the vocabulary, which is named.
        """
        if not ids:
            raise UnsupportedError(_NO_TOKENS)
        for id_ in ids:
            if not 0 <= id_ < self.vocabulary:
                raise UnsupportedError(
                    f"prompt id {id_}, but {self.folder} knows 0 to {self.vocabulary - 1}"
                )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as the tokenizer begins one.

        Raises:
            UnsupportedError: there is no tokenizer, transformers cannot read it, or the text holds
                no tokens.
        """
        ids = list(self._tokenizer(text)["input_ids"])
        self.check(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; errors as `encode`."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        transformers = import_transformers()
        if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UnsupportedError(
                f"{self.folder}: no tokenizer; copy the model's tokenizer files there, or give ids"
            )
        try:
            return transformers.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        # What tokenizers of all kinds raise has no common base.
        except Exception as error:
            raise UnsupportedError(
                f"{self.folder}: transformers {transformers.__version__} cannot read the "
                f"tokenizer: {error}; copy the model's tokenizer files there, or give ids"
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

    On a CUDA device two tokens are generated first and thrown away: they compile the kernels and
    lay out the weights, which is not what is timed.

    Args:
        model: a model that generates, such as `load_model` gives.
        prompt: ids, at least one, all in the vocabulary: `Prompts.check` looks.
        max_new_tokens: how many at most, at least one; fewer where one comes that ends a text.
        temperature: 0 takes the likeliest token; from 1e-6 on tokens are drawn, with the other
            choices of generation_config.json such as top_p.
        seed: what the drawing begins with, of 64 bits. The same seed draws the same on the same
            machine.

    Raises:
        UnsupportedError: no prompt, `max_new_tokens` below 1, or another temperature or seed.
    """
    if not prompt:
        raise UnsupportedError(_NO_TOKENS)
    if max_new_tokens < 1:
        raise UnsupportedError(f"max_new_tokens is {max_new_tokens}, but at least 1 is wanted")
    if temperature != 0 and not _COLDEST <= temperature < float("inf"):
        raise UnsupportedError(
            f"temperature is {temperature}, but wanted is 0, or a number from {_COLDEST:g} on"
        )
    if not 0 <= seed < 1 << 64:
        raise UnsupportedError(f"seed is {seed}, but wanted is a number from 0 to 2**64 - 1")
    ids = torch.tensor([list(prompt)], device=model.device)
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        _run(model, ids, 2, temperature)
    with torch.random.fork_rng([model.device] if on_cuda else []):
        torch.manual_seed(seed)
        output, begun, times = _run(model, ids, max_new_tokens, temperature)
    new = output[0, ids.shape[1] :].tolist()
    later_s = times[-1] - times[0]
    return Generation(
        ids=new,
        first_token_s=times[0] - begun,
        tokens_per_s=(len(new) - 1) / later_s if len(new) > 1 else None,
    )


def _run(
    model: PreTrainedModel, ids: Tensor, max_new_tokens: int, temperature: float
) -> tuple[Tensor, float, list[float]]:
    """Output, when it began, and when each token was there, in seconds of `time.perf_counter`."""
    times: list[float] = []

    class Clock(import_transformers().StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: Any) -> Tensor:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize(input_ids.device)
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    drawing = {"do_sample": True, "temperature": temperature}
    # None overrides what generation_config.json says of drawing, which is of no use without.
    likeliest = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    begun = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        stopping_criteria=[Clock()],
        **(drawing if temperature else likeliest),
    )
    assert isinstance(output, torch.Tensor)
    return output, begun, times
