"""Samples of token ids, from text or from a dataset.

A file that ends in .jsonl is a dataset, one sample a line, with one of these keys:

    {"text": "..."}              tokenized as it is
    {"messages": [...]}          the tokenizer's chat template is applied
    {"input_ids": [1, 2, 3]}     taken as they are; needs no tokenizer

Any other file is UTF-8 text; form feeds separate its samples.

A tokenizer takes some 150 bytes of memory for each byte of a text. So a file is read part by part,
and a long text is tokenized piece by piece; a piece ends with a line where it has one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from array import array
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import DataError
from moequant.integrations.tokenizer import load_tokenizer
from moequant.storage.disk import explained

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_KEYS = ("text", "messages", "input_ids")
PIECE_CHARACTERS = 1 << 18
"""The longest text that is tokenized at once."""
_PROBE_CHARACTERS = 1000
"""Of a text that shows what the tokenizer puts before it."""


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
        self._prefix: list[int] | None = None
        self._digest = hashlib.sha256()

    @property
    def tokenized(self) -> bool:
        """Whether a sample needed the tokenizer."""
        return self._loaded is not None

    @property
    def file_sha256(self) -> str:
        """SHA-256 of the file in hex, when all samples are read."""
        return self._digest.hexdigest()

    def read(self) -> Iterator[tuple[list[int] | None, array[int]]]:
        """Of each sample the ids that begin every window of it, and the others.

        The former are what the tokenizer puts before a text; None for samples that are no text.

        Raises:
            MoequantError: the disk fails while the file is read.
            DataError: there is no such file, or it cannot be used; names the line and the key.
            UnsupportedError: text, but the checkpoint has no tokenizer that transformers reads.
        """
        if self._file.suffix != ".jsonl":
            for pieces in self._sections():
                if (sample := self._from_section(pieces)) is not None:
                    yield sample
            return
        for number, line in enumerate(self._parts(lines=True), 1):
            if line.strip():
                yield self._from_line(line, f"{self._file}: line {number}")

    def _parts(self, *, lines: bool) -> Iterator[str]:
        """The file's text in parts, which are lines if `lines`, without a byte order mark."""
        decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
        with explained(self._file, "read"):
            try:
                file = self._file.open("rb")
            except (FileNotFoundError, IsADirectoryError) as error:
                raise DataError(
                    f"{self._file}: cannot be read: {error.strerror}; give a file of UTF-8 text, "
                    "or a dataset FILE.jsonl"
                ) from error
        with file:
            while True:
                with explained(self._file, "read"):
                    data = file.readline() if lines else file.read(PIECE_CHARACTERS)
                self._digest.update(data)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    where = position - pending + error.start
                    raise DataError(
                        f"{self._file}: byte {where} is not UTF-8; give UTF-8 text or a dataset"
                    ) from None
                if not data:
                    return
                yield text.removeprefix("\ufeff") if position == 0 else text
                position += len(data)

    def _sections(self) -> Iterator[Iterator[str]]:
        """The pieces of each section; to be used up before the next one is asked for."""
        parts = self._parts(lines=False)
        left: list[str] = [""]

        def pieces() -> Iterator[str]:
            """The pieces up to the next form feed; leaves in `left` what is behind it."""
            text = left.pop()
            while True:
                text, found, rest = text.partition("\f")
                if found:
                    left.append(rest)
                    break
                while len(text) > PIECE_CHARACTERS:
                    piece, text = _cut_piece(text)
                    yield piece
                if (part := next(parts, None)) is None:
                    break
                text += part
            yield from _pieces(text)

        while left:
            yield pieces()

    def _from_section(self, pieces: Iterator[str]) -> tuple[list[int], array[int]] | None:
        """A sample; None for a section without text."""
        ids, blank = array("i"), True
        for piece in pieces:
            blank = blank and not piece.strip()
            ids.extend(self._tokenize(piece, str(self._file)))
        return None if blank else (self._prefix or [], ids)

    def _from_line(self, line: str, where: str) -> tuple[list[int] | None, array[int]]:
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
            ids = self._tokenize_all(value, where)
            return self._prefix or [], ids
        if keys[0] == "messages":
            return None, self._from_messages(value, where)
        return None, array("i", self._checked(value, where))

    def _from_messages(self, messages: object, where: str) -> array[int]:
        self.chat_template = True
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        # Templates are programs, and raise what they like.
        except Exception as error:
            raise DataError(
                f"{where}: the tokenizer's chat template cannot be applied: {error}; give messages "
                "as the template takes them, or text"
            ) from error
        return self._tokenize_all(text, where)

    def _tokenize_all(self, text: str, where: str) -> array[int]:
        try:
            text.encode()
        # JSON can spell half of a surrogate pair, which no tokenizer takes.
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: character {error.start} is {text[error.start]!a}, half of a surrogate "
                "pair, but text must be whole characters; correct the escape"
            ) from None
        ids = array("i")
        for piece in _pieces(text):
            ids.extend(self._tokenize(piece, where))
        return ids

    def _tokenize(self, piece: str, where: str) -> list[int]:
        """The token ids of a piece; the first that has any shows what stands before a text."""
        ids = self._ids_of(piece, add_special_tokens=False)
        if ids and self._prefix is None:
            probe = piece[:_PROBE_CHARACTERS]
            self._prefix = _what_precedes(
                self._ids_of(probe, add_special_tokens=False), self._ids_of(probe)
            )
        return self._checked(ids, where)

    def _ids_of(self, text: str, **settings: bool) -> list[int]:
        return list(self.tokenizer(text, verbose=False, **settings)["input_ids"])

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
            lines = 'give token ids, as lines {"input_ids": [1, 2]} of a .jsonl file'
            self._loaded = load_tokenizer(self._folder, without=lines)
        return self._loaded


def _what_precedes(ids: list[int], whole: list[int]) -> list[int]:
    """What stands in `whole` before `ids`, which others may follow; nothing if it has no `ids`."""
    for start in range(len(whole) - len(ids) + 1):
        if whole[start : start + len(ids)] == ids:
            return whole[:start]
    return []


def _pieces(text: str) -> Iterator[str]:
    while text:
        piece, text = _cut_piece(text)
        yield piece


def _cut_piece(text: str) -> tuple[str, str]:
    """The first piece of a text, and the rest."""
    if len(text) <= PIECE_CHARACTERS:
        return text, ""
    end = text.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
    return text[:end], text[end:]


def ids_digest(windows: Iterable[Sequence[int]]) -> str:
    """SHA-256 of token ids: each window as its length and its ids, int64."""
    digest = hashlib.sha256()
    for window in windows:
        for number in (len(window), *window):
            digest.update(number.to_bytes(8, "little"))
    return digest.hexdigest()
