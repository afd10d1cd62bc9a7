"""GPTQ: codes that minimize the error of a layer's outputs, under scales that are given.

With a weight [N, K], inputs x and an error E = W - decoded, the mean square of the outputs' errors
is tr(E H Et), where H is the mean of x xt. GPTQ rounds column after column to nearest, and moves
the error that is made so far to the columns that follow. With H = R Rt, R upper triangular:

    tr(E H Et) = sum over k of R[k, k]**2 * |E[:, k] + E[:, :k] @ R[:k, k] / R[k, k]|**2

so the term of column k is least where its code is the nearest to W[:, k] plus the errors of the
columns before, each times R[j, k] / R[k, k]. This is the same as GPTQ's usual form with the
Cholesky factor of the inverse, and needs no inverse. R follows from the Cholesky factor of H with
its rows and columns in reverse order.

Scales are not changed: any rule of a format may choose them, and they stay those of their columns
when columns are rounded in another order.

Sources: Frantar et al., "GPTQ" (arXiv 2210.17323), for the method and the order by activations;
Chee et al., "QuIP" (arXiv 2307.13304), theorem 6, for the form with R.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import StatisticsError, UnsupportedError
from moequant.formats import QuantizedWeight, dequantize, get_format
from moequant.formats.base import check_values
from moequant.formats.blocks import expand_blocks
from moequant.formats.elements import pack_nibbles, unpack_nibbles
from moequant.quantizers.column_rounding import COLUMNS, round_columns_in_torch
from moequant.quantizers.gpu_columns import column_rounder
from moequant.quantizers.linear_algebra import cholesky

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moequant.formats.elements import Element
    from moequant.quantizers.column_rounding import RoundColumns

DAMPINGS = (0.01, 0.1, 1.0, 10.0)
"""What is added to the diagonal of H, in units of its mean, in the order in which they are tried.
The larger, the nearer the result is to rounding to nearest."""

_TIE = 2.0**-20
"""How far from a tie a number may be, in units of its scale or of itself where it is larger, to be
rounded either way by another order of float64 sums. Sums of 2**14 products are exact to 2**-39 of
their terms' magnitudes, and rounding to float32 before a code is chosen adds 2**-24."""
_GIVEN_BACK_BYTES = 32 << 20
"""The largest value of glibc's threshold for blocks that are mapped, which grows up to it."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What GPTQ made of a weight.

    Attributes:
        weight: the codes that were chosen, with the scales that were given.
        damping: the one of DAMPINGS that was used; None if the given codes were kept, because no
            damping made the error smaller.
        error: tr(E H Et) of `weight`.
        error_before: tr(E H Et) of the weight that was given.
    """

    weight: QuantizedWeight
    damping: float | None
    error: float
    error_before: float


class Gptq:
    """Rounds weights that multiply the same inputs, such as gate and up of one expert.

    H may be singular: of fewer tokens than channels, or with channels that are always 0, whose
    columns are rounded to nearest. Where it is 0 altogether, or diagonal, nothing can be gained and
    the given codes are kept.

    On a CPU one thread computes, so that the bits do not depend on how many there are: products are
    summed in another order otherwise. Another BLAS, processor or device may round the last bits of
    float64 differently, and a code then goes to the other side of a tie.

    Args:
        hessian: [K, K] float32 or float64, symmetric, the mean of x xt; on any device, where the
            weights must be, too.
        activation_order: round the columns with the largest mean squares first; by default from
            left to right.
        name: name of the weight for error messages.
        round_columns: rounds a block of columns as `round_columns_in_torch` does, such as the
            method of NativeQuantizer, for a CPU; by default that function on a CPU, and on a GPU
            what `column_rounder` chooses.

    Raises:
        StatisticsError: another shape or dtype, a number that is NaN or Inf, a negative mean
            square, or no symmetry.
    """

    def __init__(
        self,
        hessian: Tensor,
        *,
        activation_order: bool = False,
        name: str = "weight",
        round_columns: RoundColumns | None = None,
    ) -> None:
        _check_hessian(hessian, name)
        self._round_columns = round_columns
        self._hessian = hessian.double()
        squares = self._hessian.diagonal()
        self._order = (
            torch.argsort(squares, descending=True, stable=True)
            if activation_order
            else torch.arange(len(squares), device=hessian.device)
        )
        # Weights with the same inputs seldom need different dampings.
        self._last: tuple[float, Tensor | None] | None = None

    def round(self, w: Tensor, given: QuantizedWeight, *, name: str = "weight") -> Rounding:
        """Choose codes for `w` with the scales of `given`.

        Dampings are tried in order until one gives a smaller error than the codes of `given`.

        Args:
            w: [N, K] bfloat16, float16 or float32.
            given: `w`, rounded to nearest by its format.
            name: name of the weight for error messages.

        Raises:
            UnsupportedError: shapes that do not fit each other, or an unsupported dtype.
            NonFiniteError: `w` has NaN or Inf; the message has index and value.
        """
        self._check_weight(w, given, name)
        with _one_thread():
            before = self._error(w, given)
            for damping in DAMPINGS:
                feedback = self._feedback(damping)
                if feedback is None:
                    continue
                found = self._sweep(w, given, feedback)
                error = self._error(w, found)
                if error < before:
                    return Rounding(weight=found, damping=damping, error=error, error_before=before)
        return Rounding(weight=given, damping=None, error=before, error_before=before)

    def may_have_rounded(
        self, w: Tensor, given: QuantizedWeight, found: QuantizedWeight, *, name: str = "weight"
    ) -> bool:
        """Whether `round` with the first damping gives the codes of `found`, up to ties.

        Given the errors of all columns before it, the target of a column follows, so that every
        code is checked by itself. A code is also accepted where its target is so close to a tie
        that another processor, or another order of sums, rounds it to the other side. This takes
        one product of matrices, where `round` goes from column to column.

        Args:
            w: as for `round`.
            given: as for `round`.
            found: codes in question; its scales are not used.
            name: as for `round`.

        Returns:
            True if every code is accepted and the error is smaller than that of `given`. False also
            where `round` would use another damping, or keep the codes of `given`.

        Raises:
            UnsupportedError, NonFiniteError: as `round`.
        """
        self._check_weight(w, given, name)
        rounded = replace(given, qdata=found.qdata)
        with _one_thread():
            feedback = self._feedback(DAMPINGS[0])
            if feedback is None or not self._error(w, rounded) < self._error(w, given):
                return False
            scale = _column_scales(given)[:, self._order]
            weights = w.double()[:, self._order]
            codes = unpacked_codes(rounded)[:, self._order]
            element = get_format(given.format).element
            errors = weights - element.decode(codes.view(element.dtype)).double() * scale
            # The diagonal is a column's own error, which is not yet made when it is rounded.
            x = weights.addmm_(errors, feedback.tril(-1).T).div_(scale)
        slack = x.abs().clamp_(min=1.0).mul_(_TIE)
        either = torch.zeros_like(codes, dtype=torch.bool)
        for number in (x, x - slack, x + slack):
            either |= element.encode(number.float()).view(torch.uint8) == codes
        return bool(either.all())

    def _check_weight(self, w: Tensor, given: QuantizedWeight, name: str) -> None:
        """Raises as `round`."""
        K = len(self._hessian)
        if w.shape != given.shape or w.ndim != 2 or w.shape[-1] != K:
            raise UnsupportedError(
                f"{name}: shape {list(w.shape)}, rounded to {list(given.shape)}, but GPTQ with a "
                f"Hessian [{K}, {K}] needs both as [N, {K}]"
            )
        check_values(w, name)

    def _error(self, w: Tensor, q: QuantizedWeight) -> float:
        """tr(E H Et), in float64."""
        E = w.double() - dequantize(q).double()
        return float((E @ self._hessian).mul_(E).sum())

    def _feedback(self, damping: float) -> Tensor | None:
        """`_compute_feedback`, of which the last result is kept."""
        if self._last is None or self._last[0] != damping:
            self._last = None  # frees its memory first
            self._last = damping, self._compute_feedback(damping)
        return self._last[1]

    def _compute_feedback(self, damping: float) -> Tensor | None:
        """The factors R[j, k] / R[k, k] at [k, j], [K, K] float64, in the order of rounding.

        None where H is 0 or, with this damping, not positive definite.
        """
        mean = self._hessian.diagonal().mean()
        if len(self._hessian) == 0 or mean == 0:
            return None
        # Large matrices are freed as soon as they can be: see `gptq_bytes`.
        reverse = self._order.flip(0)
        H = self._hessian[reverse[:, None], reverse]
        H.diagonal().add_(damping * mean)
        lower = cholesky(H)
        del H
        if lower is None:
            return None
        R: Tensor = lower.flip(0, 1)
        del lower
        return R.div_(R.diagonal().clone()).T

    def _sweep(self, w: Tensor, given: QuantizedWeight, feedback: Tensor) -> QuantizedWeight:
        """Round column after column; rows here are the columns of `w`, in the order of rounding."""
        element = get_format(given.format).element
        round_columns = self._round_columns or _fastest(element, w.device)
        scale = _column_scales(given).T[self._order].contiguous()
        target = w.double().T[self._order].contiguous()
        errors = target.clone()
        codes = torch.empty(target.shape, dtype=torch.uint8, device=w.device)
        for start in range(0, len(target), COLUMNS):
            block = slice(start, start + COLUMNS)
            target[block].add_(feedback[block, :start] @ errors[:start])
            round_columns(
                element,
                target[block],
                scale[block],
                codes[block],
                errors[block],
                feedback[block, block],
            )
        back = torch.empty_like(self._order)
        back[self._order] = torch.arange(len(back), device=back.device)
        # Not all devices can index float8.
        qdata = codes[back].T.contiguous().view(element.dtype)
        packed = qdata if element.bits == 8 else pack_nibbles(qdata)
        return replace(given, qdata=packed)


def _fastest(element: Element, device: torch.device) -> RoundColumns:
    if device.type == "cuda":
        return column_rounder(element, device).round_columns
    return round_columns_in_torch


def gptq_bytes(shape: Sequence[int]) -> int:
    """Upper bound of the temporary memory to round weights [N, K] by one Hessian, with reading it.

    At most three float64 matrices [K, K] and two in float32 exist at once, and six float64 [N, K].
    Twice that where they are below the size from which the C library gives freed memory back: what
    it keeps fits the next matrix only if nothing else was put there. Measured with K from 1024 to
    2304: up to 1.6 times.
    """
    N, K = shape
    return sum(
        count * size * (2 if size < _GIVEN_BACK_BYTES else 1)
        for count, size in ((4, 8 * K * K), (6, 8 * N * K))
    )


def unpacked_codes(q: QuantizedWeight) -> Tensor:
    """The codes of a weight, one in each byte: [N, K] uint8."""
    codes = q.qdata.view(torch.uint8)
    return codes if get_format(q.format).codes_per_byte == 1 else unpack_nibbles(codes)


def _column_scales(q: QuantizedWeight) -> Tensor:
    """What each code is multiplied by, [N, K] float64."""
    scale = q.scale.double() if q.global_scale is None else q.scale.double() * q.global_scale
    return expand_blocks(scale, get_format(q.format).block_of(q), q.shape)


def _check_hessian(hessian: Tensor, name: str) -> None:
    """Raises as `Gptq`."""
    wanted = "calibrate again"
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise StatisticsError(
            f"{name}: the Hessian of its inputs is {list(hessian.shape)}, but must be [K, K]"
        )
    if hessian.dtype not in (torch.float32, torch.float64):
        raise StatisticsError(
            f"{name}: the Hessian of its inputs is {hessian.dtype}, but must be torch.float32 or "
            "torch.float64"
        )
    if not bool(hessian.isfinite().all()):
        index = (~hessian.isfinite()).nonzero()[0].tolist()
        raise StatisticsError(
            f"{name}: the Hessian of its inputs has {hessian[tuple(index)].item()} at {index}, but "
            f"must be finite; {wanted}"
        )
    if bool((hessian.diagonal() < 0).any()):
        channel = int((hessian.diagonal() < 0).nonzero()[0])
        raise StatisticsError(
            f"{name}: by the Hessian of its inputs the mean square of channel {channel} is "
            f"{hessian[channel, channel].item()}, but must not be negative; {wanted}"
        )
    if not torch.equal(hessian, hessian.T):
        row, column = (hessian != hessian.T).nonzero()[0].tolist()
        raise StatisticsError(
            f"{name}: the Hessian of its inputs has {hessian[row, column].item()} at "
            f"[{row}, {column}], but {hessian[column, row].item()} at [{column}, {row}], and must "
            f"be symmetric; {wanted}"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
