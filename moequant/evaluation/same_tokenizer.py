"""Refuse a test whose tokenizer is not the reference's: its predictions are of other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from moequant.evaluation.windows import Windows


def check_same_tokenizer(
    reference: Path, test: Path, of_reference: Windows, of_test: Windows
) -> None:
    """Compare two checkpoints' vocabularies, and the token ids that the data has with each.

    Raises:
        UnsupportedError: they differ; names the first difference.
    """
    fault = _vocabulary_fault(of_reference, of_test) or _ids_fault(of_reference, of_test)
    if fault is not None:
        raise UnsupportedError(
            f"{test}: not the tokenizer of {reference}: {fault}; KL divergence compares "
            "predictions of the same tokens, so evaluate a checkpoint made of this reference"
        )


def _vocabulary_fault(of_reference: Windows, of_test: Windows) -> str | None:
    if of_reference.tokenizer is None or of_test.tokenizer is None:
        return None
    ours, others = of_reference.tokenizer.get_vocab(), of_test.tokenizer.get_vocab()
    different = [word for word in {**ours, **others} if ours.get(word) != others.get(word)]
    if not different:
        return None
    word = min(different, key=lambda word: (ours.get(word, others.get(word, 0)), word))
    return (
        f"{len(different)} tokens differ, such as {word!r}, which is {_id(others.get(word))} here "
        f"and {_id(ours.get(word))} in the reference"
    )


def _id(id_: int | None) -> str:
    return "no token" if id_ is None else f"id {id_}"


def _ids_fault(of_reference: Windows, of_test: Windows) -> str | None:
    if of_reference.first != of_test.first:
        return (
            f"a window begins with ids {list(of_test.first)} here and with "
            f"{list(of_reference.first)} in the reference"
        )
    different = (of_reference.ids != of_test.ids).nonzero()
    if not len(different):
        return None
    window, place = different[0].tolist()
    return (
        f"token {place} of window {window} is id {int(of_test.ids[window, place])} here and id "
        f"{int(of_reference.ids[window, place])} in the reference"
    )
