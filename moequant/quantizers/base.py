"""The quantizer that runs the reference functions, which faster ones derive from."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moequant.formats import Format, QuantizedWeight, dequantize_into, signal_and_noise
from moequant.formats.base import check_values
from moequant.quantizers.column_rounding import round_columns_in_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.formats import StoredWeight
    from moequant.formats.elements import Element


Allocator = Callable[..., Tensor]
"""Allocates results: called as `torch.empty(shape, dtype=dtype)`, returns uninitialized memory."""

Stored = torch.dtype | str
"""How weights are stored: the dtype of plain ones, the format's name of quantized ones."""

Job = tuple[Format, Mapping[str, str], Stored]
"""Work that kernels are compiled for: a format, all its options, and how the weights are stored.
For a plain format, quantized weights are dequantized."""

_MAPPED_BYTES = 1 << 20
"""Blocks of at least this size are allocated by mmap."""
_HUGE_PAGE_BYTES = 1 << 21
_MAX_UNUSED_BYTES = _HUGE_PAGE_BYTES // 4
"""Maximum unused part of the last huge page."""


def _ask_for_huge_pages(memory: mmap.mmap, size_bytes: int) -> int:
    """Request huge pages for the first `size_bytes` of a map, wasting at most half a megabyte.

    A page fault per 4 KiB costs more than clearing the memory, and direct writes to disk are split
    at page boundaries.

    Returns:
        The number of bytes in huge pages.
    """
    huge_bytes = (size_bytes + _MAX_UNUSED_BYTES) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    try:
        # No huge pages for the rest, even if the system uses them by default.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(mmap.MADV_HUGEPAGE, 0, huge_bytes)
    except (AttributeError, OSError):
        return 0  # not supported by this system or kernel
    return huge_bytes


class Quantizer:
    """Runs `Format.quantize_fused`, in CPU memory.

    It also decodes quantized weights and computes requantization errors, with exactly the results
    of `dequantize` and `signal_and_noise` of `moequant.formats`. Derived ones give the same bytes.
    """

    name: ClassVar[str] = "torch"
    summary: ClassVar[str] = "the reference functions, in torch operations"
    """How it computes, in words."""

    def allocate(self, size_bytes: int) -> Tensor:
        """CPU memory it likes weights and results to lie in: uint8 [size_bytes], or a few more."""
        if size_bytes < _MAPPED_BYTES:
            # The device is named because `torch.set_default_device` may have set another.
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        # A map of its own goes back to the system when it is freed. Of what the C library gives it
        # keeps blocks up to 32 MiB, for each thread, and who frees them is often not who asked.
        # Linux begins maps of whole huge pages at one.
        whole_bytes = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        try:
            memory = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            # Code that writes files would attribute an OSError to the file.
            raise MemoryError(f"{whole_bytes} bytes: {error.strerror}") from error
        huge_bytes = _ask_for_huge_pages(memory, size_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(size_bytes, huge_bytes))

    def prepare(self, format: Format, options: Mapping[str, str], stored: Stored) -> None:
        """Compile kernels for a `Job`; afterwards several threads may use them.

        Raises:
            UnavailableError: it does not work on this machine.
        """

    def prepare_comparing(self, before: Stored, after: Stored) -> None:
        """Compile kernels to `compare` weights stored like this; `prepare` includes its job's.

        Raises:
            UnavailableError: as `prepare`.
        """

    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
        scratch: Allocator = torch.empty,
        mean_squares: Sequence[Tensor] | None = None,
    ) -> list[QuantizedWeight]:
        """Quantize weights that engines fuse, such as gate and up of one expert.

        Args:
            format: the format to quantize to.
            weights: [N, K] each, on the CPU; quantized ones are decoded to float32.
            options: every option of the format with its value.
            names: names of the weights for error messages.
            empty: allocator of the results; a quantizer need not use it.
            scratch: allocator of temporary memory; a quantizer need not use it.
            mean_squares: [K] float32 for each weight, of its input channels, for the option
                `search = "weighted"` only.

        Raises:
            RecipeError, StatisticsError: as `Format.quantize_fused`.
            UnsupportedError: an unsupported shape or dtype.
            NonFiniteError: a weight has NaN or Inf; the message has its name, index and value.
        """
        numbers = self._numbers(weights, names, scratch)
        return format.quantize_fused(numbers, options, names=names, mean_squares=mean_squares)

    def round_columns(
        self,
        element: Element,
        target: Tensor,
        scale: Tensor,
        codes: Tensor,
        errors: Tensor,
        feedback: Tensor,
    ) -> None:
        """`moequant.quantizers.column_rounding.round_columns_in_torch`, on the CPU."""
        round_columns_in_torch(element, target, scale, codes, errors, feedback)

    def decode(
        self, q: QuantizedWeight, dtype: torch.dtype, *, name: str, empty: Allocator = torch.empty
    ) -> Tensor:
        """Decode a weight [N, K], rounded to `dtype`, float32 or bfloat16.

        Args:
            q: the weight, on the CPU.
            dtype: dtype of the result.
            name: name of the weight for error messages.
            empty: allocator of the result.

        Raises:
            NonFiniteError: NaN, Inf, or a number that overflows bfloat16; the message has name,
                index and value.
        """
        numbers = empty(q.shape, dtype=dtype)
        dequantize_into(q, numbers)
        check_values(numbers, name)
        return numbers

    def _numbers(
        self, weights: Sequence[StoredWeight], names: Sequence[str], scratch: Allocator
    ) -> list[Tensor]:
        """The weights, with quantized ones decoded to float32."""
        return [
            self.decode(w, torch.float32, name=name, empty=scratch)
            if isinstance(w, QuantizedWeight)
            else w
            for w, name in zip(weights, names, strict=True)
        ]

    def compare(self, before: StoredWeight, after: StoredWeight) -> tuple[float, float]:
        """`moequant.formats.signal_and_noise` of weights [N, K] on the CPU."""
        return signal_and_noise(before, after)
