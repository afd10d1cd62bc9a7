"""Weights quantized and decoded on a CPU: as `moequant.formats` does it, by the fastest means.

| quantizer | what | runs |
|---|---|---|
| native | vector code that LLVM (llvmlite) compiles as a conversion starts | where it loads |
| torch | the reference functions | elsewhere, with a warning that says why |

`MOEQUANT_QUANTIZER=torch` asks for the second, for whoever doubts the first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.quantizers.base import Job, Quantizer, UnavailableError
from moequant.quantizers.native import NativeQuantizer
from moequant.quantizers.tiles import TorchQuantizer

if TYPE_CHECKING:
    from collections.abc import Iterable

_VARIABLE = "MOEQUANT_QUANTIZER"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The quantizer of a run.

    Attributes:
        quantizer: what runs.
        reason: why it is not the fastest; None if it is.
    """

    quantizer: Quantizer
    reason: str | None = None


def choose_quantizer(jobs: Iterable[Job] = (), *, comparing: bool = False) -> Choice:
    """The fastest quantizer that runs here.

    Args:
        jobs: all there will be to do; it is made ready for them.
        comparing: whether plain weights too will be compared with what is made of them.

    Raises:
        UnsupportedError: MOEQUANT_QUANTIZER names none.
    """
    wanted = os.environ.get(_VARIABLE, "")
    if wanted not in ("", NativeQuantizer.name, TorchQuantizer.name):
        raise UnsupportedError(
            f"{_VARIABLE}={wanted}, but it is {NativeQuantizer.name} or {TorchQuantizer.name}"
        )
    if wanted == TorchQuantizer.name:
        return Choice(quantizer=TorchQuantizer(), reason=f"{_VARIABLE}={wanted}")
    try:
        quantizer = _native()
        for format, options, stored in jobs:
            quantizer.prepare(format, options, stored)
            if comparing and not format.is_plain:
                quantizer.prepare_comparing(stored, format.name)
    except UnavailableError as error:
        return Choice(quantizer=TorchQuantizer(), reason=str(error))
    return Choice(quantizer=quantizer)


@cache
def _native() -> NativeQuantizer:
    """One for the process, so that nothing is compiled twice."""
    return NativeQuantizer()


__all__ = [
    "Choice",
    "Job",
    "NativeQuantizer",
    "Quantizer",
    "TorchQuantizer",
    "choose_quantizer",
]
