"""A prompt's token ids, from text or as they are given, and the text of ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moequant.compatibility.facts import positions_in
from moequant.errors import UnsupportedError
from moequant.integrations.tokenizer import load_tokenizer, vocabulary_size
from moequant.runtime.load import open_reader
from moequant.storage.files import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

NO_TOKENS = "the prompt has no tokens; give at least one"
"""The error of an empty prompt."""


@dataclass(frozen=True, kw_only=True)
class PromptTokenizer:
    """Converts a prompt to token ids, and ids to text.

    Attributes:
        folder: the converted checkpoint.
        vocabulary: number of token ids of the model.
        positions: number of tokens that it was made for; None if config.json does not say.
    """

    folder: Path
    vocabulary: int
    positions: int | None = None

    @classmethod
    def of(cls, checkpoint: str | Path, architecture: str | Path | None = None) -> PromptTokenizer:
        """That of a converted checkpoint, or of the checkpoint of a prepared folder.

        `architecture` is a file as for `load_experts`.

        Raises:
            CheckpointError: neither of the two, or config.json gives no vocabulary size.
            UnsupportedError: an unknown architecture or quantization.
        """
        opened = open_reader(checkpoint, torch.device("cpu"), architecture).converted.checkpoint
        vocabulary = vocabulary_size(opened.config, opened.path)
        positions = positions_in(opened.config)
        return cls(folder=opened.path, vocabulary=vocabulary, positions=positions)

    def too_long(self, ids: Sequence[int], max_new_tokens: int) -> str | None:
        """A warning that prompt and answer may exceed what the model was made for, if so."""
        tokens = len(ids) + max_new_tokens
        if self.positions is None or tokens <= self.positions:
            return None
        return (
            f"{len(ids)} tokens of the prompt and {max_new_tokens} new ones may be {tokens}, but "
            f"max_position_embeddings in {self.folder / CONFIG_FILE} is {self.positions}: beyond "
            "it, the model may write nonsense; give a smaller --max-new-tokens"
        )

    def check(self, ids: Sequence[int]) -> None:
        """Check that there are ids, and that all are in the vocabulary.

        Raises:
            UnsupportedError: there are none, or one is outside the vocabulary.
        """
        if not ids:
            raise UnsupportedError(NO_TOKENS)
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
                no tokens or half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedError(
                "the prompt is not valid UTF-8; give text in UTF-8, or its tokens by --prompt-ids"
            ) from error
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
        return load_tokenizer(self.folder, without="give token ids with --prompt-ids")
