"""Samples of token ids, from text or from a dataset.

A file that ends in .jsonl is a dataset, one sample a line, with one of these keys:

    {"text": "..."}              tokenized as it is
    {"messages": [...]}          the tokenizer's chat template is applied
    {"input_ids": [1, 2, 3]}     taken as they are; needs no tokenizer

Any other file is UTF-8 text; form feeds separate its samples.
"""

from __future__ import annotations

import hashlib
import json
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import DataError
from moequant.integrations.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_KEYS = ("text", "messages", "input_ids")


class Samples:
    """Reads the samples of a file; loads the tokenizer when one needs it.

    Args:
        file: text, or a dataset by its name.
        folder: of the checkpoint, with its tokenizer.
        vocabulary: number of token ids of the model.

    Attributes:
        chat_template: whether the tokenizer's chat template was applied to a sample.
    """

    def __init__(self, *, file: Path, folder: Path, vocabulary: int) -> None:
        self.chat_template = False
        self._file = file
        self._folder = folder
        self._vocabulary = vocabulary
        self._loaded: Any = None

    @property
    def tokenized(self) -> bool:
        """Whether a sample needed the tokenizer."""
        return self._loaded is not None

    def read(self, data: bytes) -> Iterator[tuple[list[int] | None, list[int]]]:
        """Of each sample the ids that begin every window of it, and the others.

        The former are what the tokenizer puts before a text; None for samples that are no text.

        Raises:
            DataError: the data cannot be used; names the line and the key.
            UnsupportedError: text, but the checkpoint has no tokenizer that transformers reads.
        """
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._file}: byte {error.start} is not UTF-8; give UTF-8 text or a dataset"
            ) from None
        if self._file.suffix != ".jsonl":
            for section in text.split("\f"):
                if section.strip():
                    yield self._from_text(section)
            return
        # Not splitlines: texts may hold other characters that it takes for line ends.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield self._from_line(line, f"{self._file}: line {number}")

    def _from_line(self, line: str, where: str) -> tuple[list[int] | None, list[int]]:
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}; give one object a line") from None
        keys = [key for key in _KEYS if isinstance(sample, dict) and key in sample]
        if len(keys) != 1:
            raise DataError(
                f"{where}: {show(sample)}, but must be an object with exactly one of "
                f"{', '.join(_KEYS)}"
            )
        value = sample[keys[0]]
        if keys[0] == "text":
            if not isinstance(value, str):
                raise DataError(f"{where}: text is {show(value)}, but must be a string")
            return self._from_text(value)
        if keys[0] == "messages":
            return None, self._from_messages(value, where)
        return None, self._checked(value, where)

    def _from_text(self, text: str) -> tuple[list[int], list[int]]:
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        whole = list(self.tokenizer(text, verbose=False)["input_ids"])
        before = len(whole) - len(ids)
        prefix = whole[:before] if before > 0 and whole[before:] == ids else []
        return prefix, self._checked(ids, str(self._file))

    def _from_messages(self, messages: object, where: str) -> list[int]:
        self.chat_template = True
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        # Templates are programs, and raise what they like.
        except Exception as error:
            raise DataError(
                f"{where}: the tokenizer's chat template cannot be applied: {error}; give messages "
                "as the template takes them, or text"
            ) from error
        return self._checked(
            list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), where
        )

    def _checked(self, ids: object, where: str) -> list[int]:
        if not isinstance(ids, list):
            raise DataError(f"{where}: input_ids is {show(ids)}, but must be a list of token ids")
        for id_ in ids:
            if type(id_) is not int or not 0 <= id_ < self._vocabulary:
                raise DataError(
                    f"{where}: {show(id_)} is no token id of the model; ids are 0 to "
                    f"{self._vocabulary - 1}. Use the tokenizer of {self._folder}"
                )
        return ids

    @property
    def tokenizer(self) -> Any:
        """That of the checkpoint; raises UnsupportedError if there is none."""
        if self._loaded is None:
            self._loaded = load_tokenizer(self._folder)
        return self._loaded


def ids_digest(windows: Iterable[Sequence[int]]) -> str:
    """SHA-256 of token ids: each window as its length and its ids, int64."""
    digest = hashlib.sha256()
    for window in windows:
        for number in (len(window), *window):
            digest.update(number.to_bytes(8, "little"))
    return digest.hexdigest()
