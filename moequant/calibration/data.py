"""What a model is run over for calibration: sequences of token ids, from text or from a dataset.

Samples, as `moequant.streaming.samples` reads them, are cut into windows. A window of text begins
with what the tokenizer puts before a text, such as <s>. No window is padded, so that the model sees
nothing but the data.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from moequant.errors import DataError
from moequant.statistics import DataRecord
from moequant.streaming.samples import Samples, ids_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

_MIN_TOKENS = 2
"""Shorter windows are left out: what a model computes of a first token alone says little."""


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """The sequences to run a model over.

    Attributes:
        batches: token ids [B, S] int64, without padding; windows of a batch have one length.
        record: where they are from.
    """

    batches: tuple[Tensor, ...]
    record: DataRecord


def read_data(
    file: Path,
    *,
    folder: Path,
    vocabulary: int,
    tokens: int,
    window_tokens: int,
    batch_tokens: int,
) -> CalibrationData:
    """Read a file of calibration data.

    Args:
        file: text, or a dataset by its name.
        folder: of the checkpoint, with its tokenizer.
        vocabulary: number of token ids of the model.
        tokens: at most so many are taken, in whole windows spread evenly over the file.
        window_tokens: length of the longest window; at most `tokens`.
        batch_tokens: at most so many in a batch, which has at least one window.

    Raises:
        DataError: the file cannot be read or used; names the line and the key.
        UnsupportedError: text, but the checkpoint has no tokenizer that transformers reads.
    """
    window_tokens = min(window_tokens, tokens)
    reader = Samples(file=file, folder=folder, vocabulary=vocabulary)
    # Arrays take 4 bytes an id, lists 8 and more.
    windows: list[array[int]] = []
    samples = 0
    for prefix, ids in reader.read():
        samples += 1
        windows += _cut(array("i", prefix or []), ids, window_tokens)
    if not samples:
        raise DataError(f"{file}: no text in it; give a file with text or token ids")
    chosen = _spread(windows, tokens)
    if not chosen:
        raise DataError(
            f"{file}: no window of {_MIN_TOKENS} to {window_tokens} tokens in it; give more data, "
            "or a larger --tokens"
        )
    return CalibrationData(
        batches=tuple(_batches(chosen, batch_tokens)),
        record=DataRecord(
            sha256=ids_digest(chosen),
            file_sha256=reader.file_sha256,
            windows=len(chosen),
            tokens=sum(map(len, chosen)),
            window_tokens=window_tokens,
            samples=samples,
            chat_template=reader.chat_template,
        ),
    )


def _cut(prefix: array[int], ids: array[int], window_tokens: int) -> Iterator[array[int]]:
    """The windows of a sample, each with `prefix`; a rest that is too short is left out."""
    step = max(window_tokens - len(prefix), 1)
    for start in range(0, len(ids), step):
        window = (prefix + ids[start : start + step])[:window_tokens]
        if len(window) >= _MIN_TOKENS:
            yield window


def _spread(windows: Sequence[array[int]], tokens: int) -> list[array[int]]:
    """Windows of at most `tokens` in total, evenly from all."""
    total = sum(map(len, windows))
    if total <= tokens:
        return list(windows)
    chosen, due = [], 0
    for window in windows:
        # In units of 1 / total, so that nothing is rounded.
        due += len(window) * tokens
        if due >= len(window) * total:
            due -= len(window) * total
            chosen.append(window)
    return chosen


def _batches(windows: Sequence[array[int]], batch_tokens: int) -> Iterator[Tensor]:
    """Windows of one length together; the longest, which take most memory, come first."""
    ordered = sorted(windows, key=len, reverse=True)
    for length, alike in groupby(ordered, key=len):
        same, count = [list(window) for window in alike], max(batch_tokens // length, 1)
        for start in range(0, len(same), count):
            yield torch.tensor(same[start : start + count], dtype=torch.int64)
