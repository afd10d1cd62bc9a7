"""Compare a quantizer with the reference functions before it is used.

A wrong byte in a checkpoint would be found by nobody, and there are more processors and compilers
than anyone has tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from moequant.quantizers.base import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format, QuantizedWeight
    from moequant.quantizers.base import Allocator


class Run(Protocol):
    """Quantizes as `Quantizer.quantize_fused` does."""

    def __call__(
        self,
        format: Format,
        weights: Sequence[Tensor],
        options: Mapping[str, str],
        names: Sequence[str],
        empty: Allocator,
    ) -> list[QuantizedWeight]:
        """The weights, quantized."""


def check_bytes(
    format: Format, options: Mapping[str, str], dtype: torch.dtype, run: Run, where: str
) -> None:
    """Quantize every finite pattern of 16 bits, and common sizes, by `run` and by the reference.

    Raises:
        UnavailableError: a byte differs; says `where`.
    """
    for w in _probes(dtype):
        (wanted,) = format.quantize_fused([w], options, names=["probe"])
        (found,) = run(format, [w], options, ["probe"], torch.empty)
        if not all(_same_bytes(found.tensors()[k], t) for k, t in wanted.tensors().items()):
            raise UnavailableError(
                f"{format.name}, compiled for {where}, gives other bytes than the reference"
            )


def _probes(dtype: torch.dtype) -> Iterator[Tensor]:
    """Weights [64, 1024]: every finite pattern of 16 bits, in order and mixed, and common sizes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    # An odd factor gives every number once, and neighbours of unlike magnitude.
    for order in (patterns, patterns * 40503 % (1 << 16)):
        w = order.to(torch.int16).view(torch.float16 if dtype == torch.float16 else torch.bfloat16)
        yield torch.where(w.isfinite(), w, 0).to(dtype).reshape(64, 1024)
    fractions = (patterns * 40503 % (1 << 16) - (1 << 15)).to(torch.float32) / (1 << 15)
    yield (fractions**5 * 0.1).to(dtype).reshape(64, 1024)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
