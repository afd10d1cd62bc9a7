"""Fast implementations of `moequant.formats` on a CPU.

| quantizer | how it computes | used |
|---|---|---|
| native | vector code that LLVM (llvmlite) compiles at the start of a conversion | if it loads |
| torch | the reference functions | otherwise, with a warning that has the reason |

`MOEQUANT_QUANTIZER=torch` selects the reference functions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.native_code import UnavailableError
from moequant.quantizers.base import Job, Quantizer
from moequant.quantizers.native import NativeQuantizer

if TYPE_CHECKING:
    from collections.abc import Iterable

_VARIABLE = "MOEQUANT_QUANTIZER"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The quantizer of a run.

    Attributes:
        quantizer: the quantizer to use.
        reason: why it is not the fastest one; None if it is.
    """

    quantizer: Quantizer
    reason: str | None = None


def choose_quantizer(jobs: Iterable[Job] = (), *, comparing: bool = False) -> Choice:
    """The fastest quantizer that runs on this machine.

    Args:
        jobs: all the work to come; kernels are compiled for it.
        comparing: whether plain weights will also be compared with their quantized form.

    Raises:
        UnsupportedError: MOEQUANT_QUANTIZER names no quantizer.
    """
    wanted = os.environ.get(_VARIABLE, "")
    if wanted not in ("", NativeQuantizer.name, Quantizer.name):
        raise UnsupportedError(
            f"{_VARIABLE}={wanted}, but must be {NativeQuantizer.name} or {Quantizer.name}"
        )
    if wanted == Quantizer.name:
        return Choice(quantizer=Quantizer(), reason=f"{_VARIABLE}={wanted}")
    try:
        quantizer = _native()
        for format, options, stored in jobs:
            quantizer.prepare(format, options, stored)
            if comparing and not format.is_plain:
                quantizer.prepare_comparing(stored, format.name)
    except UnavailableError as error:
        return Choice(quantizer=Quantizer(), reason=str(error))
    return Choice(quantizer=quantizer)


@cache
def _native() -> NativeQuantizer:
    """One quantizer per process, so that nothing is compiled twice."""
    return NativeQuantizer()


__all__ = [
    "Choice",
    "Job",
    "NativeQuantizer",
    "Quantizer",
    "choose_quantizer",
]
