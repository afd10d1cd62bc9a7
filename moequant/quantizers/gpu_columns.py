"""What rounds blocks of columns on a GPU: a Triton kernel where it runs, else torch operations.

The kernel is compiled and compared with the reference once for each element and GPU, in one thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from moequant.quantizers.column_rounding import COLUMNS, round_columns_in_torch

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats.elements import Element
    from moequant.quantizers.column_rounding import RoundColumns

_PREPARING = threading.Lock()
_CAPABILITY = (8, 0)
"""The least that Triton compiles for."""
_ROWS = 9
"""Of the comparison: more than a program has, and not a multiple."""


@dataclass(frozen=True, kw_only=True)
class ColumnRounder:
    """What rounds columns.

    Attributes:
        round_columns: called as `round_columns_in_torch`.
        reason: why it is not the kernel, in one clause in which that is "it"; None if it is.
    """

    round_columns: RoundColumns
    reason: str | None = None


def column_rounder(element: Element, device: torch.device) -> ColumnRounder:
    """The fastest that runs on a CUDA device, ready for several threads."""
    with _PREPARING:
        return _prepared(element, device)


@cache
def _prepared(element: Element, device: torch.device) -> ColumnRounder:
    reason = _why_no_triton(device)
    if reason is None:
        try:
            reason = _why_not_equal(element, device)
        # Triton raises classes of its own, and what the C compiler of its launcher does if there is
        # none, or it fails. The reason is said before anything is computed.
        except Exception as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            reason = f"it does not run on {device} ({first})"
    if reason is not None:
        return ColumnRounder(round_columns=round_columns_in_torch, reason=reason)
    return ColumnRounder(round_columns=_round_columns)


def _why_no_triton(device: torch.device) -> str | None:
    """Why Triton has no kernel for a CUDA device, in one clause; None if it may."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        found_text, wanted = (".".join(map(str, one)) for one in (found, _CAPABILITY))
        return f"Triton needs compute capability {wanted}, and {device} has {found_text}"
    return None


def _round_columns(
    element: Element,
    target: Tensor,
    scale: Tensor,
    codes: Tensor,
    errors: Tensor,
    feedback: Tensor,
) -> None:
    # Here, because it imports triton.
    from moequant.kernels.gptq_columns import round_columns

    round_columns(element.name, target, scale, codes, errors, feedback)


def _why_not_equal(element: Element, device: torch.device) -> str | None:
    """Compare the kernel with the reference on the CPU; None if all bits are the same.

    All sums and products are exact, so that no order of them matters: factors are eighths, and
    scales and weights have few bits. Quotients are rounded.
    """
    g = torch.Generator().manual_seed(0)
    shape = (COLUMNS, _ROWS)

    def integers(low: int, high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, size, generator=g, device="cpu").double()

    scale = integers(1, 8, shape) * torch.exp2(integers(-4, 4, shape))
    w = integers(-64, 65, shape) / 64 * element.largest * scale
    w[:, 0] = -0.0
    feedback = integers(-8, 9, (COLUMNS, COLUMNS)) / 8
    results = []
    for place, by in (("cpu", round_columns_in_torch), (device, _round_columns)):
        codes = torch.empty(shape, dtype=torch.uint8, device=place)
        # Copies, which are overwritten.
        errors = w.clone().to(place)
        by(element, w.clone().to(place), scale.to(place), codes, errors, feedback.to(place))
        results.append((codes.cpu(), errors.cpu()))
    if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
        return f"it gives other codes than the reference on {device}"
    return None
