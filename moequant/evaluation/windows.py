"""What models are evaluated on: windows of one length, by section.

Form feeds separate the sections of a text; a dataset is one section. Each section is cut into runs
of tokens, and runs are taken evenly from it. A window of text begins with what the tokenizer puts
before a text, or else with one token that begins a document: `<|endoftext|>` where the vocabulary
has it, as models trained with that token want it, else the bos or the eos token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import DataError
from moequant.streaming.samples import Samples, ids_digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows to evaluate on.

    Attributes:
        ids: token ids [W, S] int64, section after section.
        sections: of each window the index of its section.
        section_count: number of sections, of which some may have no window.
        first: the token ids that begin every window of text; empty for a dataset without text.
        file_sha256: digest of the file they are from.
        chat_template: whether the tokenizer's chat template was applied to messages.
        tokenizer: transformers' of the checkpoint; None if no sample needed it.
    """

    ids: Tensor
    sections: tuple[int, ...]
    section_count: int
    first: tuple[int, ...]
    file_sha256: str
    chat_template: bool
    tokenizer: Any

    def batches(self, batch_tokens: int) -> tuple[Tensor, ...]:
        """The windows in order, as many together as have `batch_tokens`, at least one: [B, S]."""
        return torch.split(self.ids, max(batch_tokens // self.ids.shape[1], 1))

    @property
    def record(self) -> dict[str, Any]:
        """What identifies them, as a JSON document."""
        return {
            "sha256": ids_digest(self.ids.tolist()),
            "file_sha256": self.file_sha256,
            "windows": len(self.ids),
            "window_tokens": self.ids.shape[1],
            "windows_by_section": [self.sections.count(n) for n in range(self.section_count)],
            "first_tokens": list(self.first),
            "chat_template": self.chat_template,
        }


def read_windows(
    file: Path, *, folder: Path, vocabulary: int, windows: int, tokens: int
) -> Windows:
    """Read windows from a file of text, or a dataset.

    Args:
        file: text, or a dataset by its name: see `moequant.streaming.samples`.
        folder: of the checkpoint, with its tokenizer.
        vocabulary: number of token ids of the model.
        windows: how many are taken, as many from each section as from any other, give or take one.
        tokens: of each window.

    Raises:
        DataError: the file cannot be read or used, or a section has too few windows.
        UnsupportedError: text, but the checkpoint has no tokenizer that transformers reads.
    """
    reader = Samples(file=file, folder=folder, vocabulary=vocabulary)
    of_samples: list[list[array[int]]] = []
    first: list[int] = []
    for prefix, ids in reader.read():
        begin: list[int] = []
        if prefix is not None:
            first = begin = prefix or [_first_token(reader.tokenizer, folder)]
        of_samples.append(_cut(array("i", begin), ids, tokens))
    sections = of_samples
    if file.suffix == ".jsonl":
        sections = [[window for found in of_samples for window in found]]
    rows, where = _choose(file, sections, windows, tokens)
    return Windows(
        ids=torch.tensor(rows, dtype=torch.int64),
        sections=tuple(where),
        section_count=len(sections),
        first=tuple(first),
        file_sha256=reader.file_sha256,
        chat_template=reader.chat_template,
        tokenizer=reader.tokenizer if reader.tokenized else None,
    )


def _first_token(tokenizer: Any, folder: Path) -> int:
    known = tokenizer.get_vocab().get(_END_OF_TEXT)
    for id_ in (known, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if id_ is not None:
            return int(id_)
    raise DataError(
        f"{folder}: its tokenizer puts no token before a text and has none of {_END_OF_TEXT}, bos "
        "and eos, so a window cannot begin; give a dataset of input_ids"
    )


def _cut(first: array[int], ids: array[int], tokens: int) -> list[array[int]]:
    """The windows of a sample, each beginning with `first`; what is left over is left out."""
    step = tokens - len(first)
    if step < 1:
        raise DataError(
            f"windows of {tokens} tokens, but {len(first)} of them precede a text; give more "
            "--tokens"
        )
    return [first + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)]


def _choose(
    file: Path, sections: Sequence[list[array[int]]], windows: int, tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Windows evenly from all sections, and the section of each."""
    if not sections:
        raise DataError(f"{file}: no text in it; give a file with text or token ids")
    rows: list[list[int]] = []
    where: list[int] = []
    for index, found in enumerate(sections):
        want = windows // len(sections) + (index < windows % len(sections))
        if len(found) < want:
            raise DataError(
                f"{file}: section {index} has {len(found)} windows of {tokens} tokens, but {want} "
                "are wanted of it; give more text, fewer --windows, or fewer --tokens"
            )
        rows += [found[n * len(found) // want].tolist() for n in range(want)]
        where += [index] * want
    return rows, where
