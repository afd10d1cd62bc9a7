"""Compare a quantizer with the reference functions on this machine, before it is used.

Nobody would notice a wrong byte in a checkpoint, and there are more processors and compilers than
tests can cover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats import QuantizedWeight, dequantize, get_format, signal_and_noise
from moequant.formats.base import WEIGHTED
from moequant.native_code import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format, StoredWeight
    from moequant.quantizers.base import Stored

_SHAPE = (64, 1024)
_ODD = 40503
"""An odd factor: multiples modulo 2**16 are a permutation that mixes magnitudes."""


def check_bytes(
    format: Format,
    options: Mapping[str, str],
    stored: Stored,
    run: Callable[[StoredWeight, Tensor | None], QuantizedWeight],
    where: str,
) -> None:
    """Quantize every finite 16-bit pattern, and common magnitudes, by `run` and the reference.

    For quantized weights: every code, with scales of all magnitudes. A weighted search gets mean
    squares of many magnitudes, some 0.

    Raises:
        UnavailableError: a byte differs; the message has `where`.
    """
    for w in _probes(stored):
        numbers = dequantize(w) if isinstance(w, QuantizedWeight) else w
        squares = [_mean_square()] if options.get("search") == WEIGHTED else None
        (wanted,) = format.quantize_fused([numbers], options, names=["probe"], mean_squares=squares)
        found = run(w, format.importances([numbers], options, squares, names=["probe"])[0])
        if not all(_same_bytes(found.tensors()[k], t) for k, t in wanted.tensors().items()):
            raise UnavailableError(
                f"{format.name}{_of(stored)}, compiled for {where}, gives other bytes than the "
                "reference"
            )


def check_decoding(
    stored: str,
    dtype: torch.dtype,
    run: Callable[[QuantizedWeight], tuple[Tensor, bool]],
    where: str,
) -> None:
    """Decode every code, with scales of all magnitudes, by `run` and the reference.

    Raises:
        UnavailableError: a byte differs; the message has `where`.
    """
    for q in _encoded(stored):
        found, is_finite = run(q)
        wanted = dequantize(q).to(dtype)
        if not _same_bytes(found, wanted) or is_finite != bool(wanted.isfinite().all()):
            raise UnavailableError(
                f"decoding {stored}, compiled for {where}, gives other numbers than the reference"
            )


def check_sums(
    stored: Stored,
    written: Stored,
    run: Callable[[StoredWeight, StoredWeight], tuple[float, float]],
    where: str,
) -> None:
    """Compare weights by `run` and the reference.

    Raises:
        UnavailableError: a bit of a sum differs; the message has `where`.
    """
    for before in _probes(stored):
        for after in _probes(written):
            if run(before, after) != signal_and_noise(before, after):
                raise UnavailableError(
                    f"the comparison{_of(stored)}, compiled for {where}, gives other sums than the "
                    "reference"
                )


def _of(stored: Stored) -> str:
    return f" of {stored}" if isinstance(stored, str) else ""


def _probes(stored: Stored) -> Iterator[StoredWeight]:
    """Weights of _SHAPE, stored in this way."""
    yield from _encoded(stored) if isinstance(stored, str) else _plain(stored)


def _plain(dtype: torch.dtype) -> Iterator[Tensor]:
    """Every finite 16-bit pattern, in order and permuted, and common magnitudes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    for order in (patterns, patterns * _ODD % (1 << 16)):
        w = order.to(torch.int16).view(torch.float16 if dtype == torch.float16 else torch.bfloat16)
        yield torch.where(w.isfinite(), w, 0).to(dtype).reshape(_SHAPE)
    fractions = (patterns * _ODD % (1 << 16) - (1 << 15)).to(torch.float32) / (1 << 15)
    yield (fractions**5 * 0.1).to(dtype).reshape(_SHAPE)


def _mean_square() -> Tensor:
    """Of the channels of _SHAPE: of 16 powers of two and beside them, and some 0."""
    order = torch.arange(_SHAPE[1], dtype=torch.int64) * _ODD
    squares = (1 + order % 64 / 64) * torch.exp2(-(order // 64 % 16).float())
    return torch.where(order % 67 == 0, 0.0, squares).float()


def _encoded(format: str) -> Iterator[QuantizedWeight]:
    """Every code except NaN, with scales of every exponent for which all numbers are finite."""
    specs = get_format(format).specs(_SHAPE)
    qdata, scale = specs["qdata"], specs["scale"]
    for turn in (1, _ODD):
        yield QuantizedWeight(
            format=format,
            qdata=_pattern(qdata.dtype, qdata.shape, turn),
            scale=_pattern(scale.dtype, scale.shape, turn),
            # Not a power of two, so that products are rounded.
            global_scale=torch.tensor(0.003, dtype=torch.float32)
            if "global_scale" in specs
            else None,
            shape=torch.Size(_SHAPE),
        )


def _pattern(dtype: torch.dtype, shape: Sequence[int], turn: int) -> Tensor:
    """Finite codes or scales, all or a sample of them, permuted by the factor `turn`."""
    count = torch.Size(shape).numel()
    order = torch.arange(count, dtype=torch.int64) * turn
    if dtype == torch.uint8:
        found = (order % 256).to(dtype)
    elif dtype == torch.float8_e4m3fn:
        code = order % 256
        found = torch.where((code & 0x7F) == 0x7F, 0, code).to(torch.uint8).view(dtype)
    elif dtype == torch.float8_e8m0fnu:
        found = (order % 247).to(torch.uint8).view(dtype)  # 448 * 2**(246 - 127) is finite
    else:
        # 448 * 2**118 * (2 - 1/64) is finite.
        exponent = order * 37 % 258 - 140
        found = ((1 + order % 64 / 64) * torch.exp2(exponent.double())).to(dtype)
    return found.reshape(tuple(shape))


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
