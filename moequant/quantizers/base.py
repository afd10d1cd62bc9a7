"""What a quantizer is: one way to compute what `moequant.formats` defines."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moequant.formats import Format, QuantizedWeight, dequantize_into, signal_and_noise
from moequant.formats.base import check_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.formats import StoredWeight


class UnavailableError(Exception):
    """A quantizer does not run on this machine; says why. Never reaches a user."""


Allocator = Callable[..., Tensor]
"""Where results go: called as `torch.empty(shape, dtype=dtype)`, for CPU memory of any values."""

Stored = torch.dtype | str
"""How weights are stored: the dtype of plain ones, the name of the format of quantized ones."""

Job = tuple[Format, Mapping[str, str], Stored]
"""What a quantizer is made ready for: a format, all its options, and how the weights are stored.
To a plain format, quantized weights are decoded."""

_MAPPED_BYTES = 1 << 20
"""From so many on, memory is a map of its own."""
_HUGE_PAGE_BYTES = 1 << 21
_MOST_UNUSED_BYTES = _HUGE_PAGE_BYTES // 4
"""Of the last huge page, at most."""


def _ask_for_huge_pages(memory: mmap.mmap, size_bytes: int) -> int:
    """For `size_bytes` at the start of a map, but not where half a megabyte would be wasted.

    A fault for each 4 KiB costs more than to clear them, and a disk is handed them one by one.

    Returns:
        How many bytes will lie in huge pages.
    """
    huge_bytes = (size_bytes + _MOST_UNUSED_BYTES) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    try:
        # The rest not even where the system gives them unasked.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(mmap.MADV_HUGEPAGE, 0, huge_bytes)
    except (AttributeError, OSError):
        return 0  # a system or a kernel that has none
    return huge_bytes


class Quantizer(ABC):
    """Computes, from and to CPU memory, the bytes that `Format.quantize_fused` computes.

    It also decodes weights that are stored in a quantized form, and says what was lost of them: as
    `dequantize` and `signal_and_noise` of `moequant.formats`, to the last bit.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """How it computes, for people."""

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
            # Who writes files takes an OSError for the file's.
            raise MemoryError(f"{whole_bytes} bytes: {error.strerror}") from error
        huge_bytes = _ask_for_huge_pages(memory, size_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(size_bytes, huge_bytes))

    @abstractmethod
    def prepare(self, format: Format, options: Mapping[str, str], stored: Stored) -> None:
        """Make ready for a `Job`; after that, several threads may do it.

        Raises:
            UnavailableError: it cannot be done this way on this machine.
        """

    @abstractmethod
    def prepare_decoding(self, stored: str, dtype: torch.dtype) -> None:
        """Make ready to `decode` weights of the format `stored` to `dtype`; `prepare` may need it.

        Raises:
            UnavailableError: as `prepare`.
        """

    @abstractmethod
    def prepare_comparing(self, before: Stored, after: Stored) -> None:
        """Make ready to `compare` weights that are stored so; `prepare` does it for its job.

        Raises:
            UnavailableError: as `prepare`.
        """

    @abstractmethod
    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
        scratch: Allocator = torch.empty,
    ) -> list[QuantizedWeight]:
        """Quantize weights that engines fuse, such as gate and up of one expert.

        Args:
            format: what to make of them.
            weights: [N, K] each, on the CPU; quantized ones as the float32 they decode to.
            options: of the format, every one with its value.
            names: what errors call the weights.
            empty: may be asked for the memory of the results.
            scratch: may be asked for memory that is of no use afterwards.

        Raises:
            UnsupportedError: a shape or dtype the format cannot take.
            NonFiniteError: a weight holds NaN or Inf; names it, index and value.
        """

    def decode(
        self, q: QuantizedWeight, dtype: torch.dtype, *, name: str, empty: Allocator = torch.empty
    ) -> Tensor:
        """The numbers of a weight [N, K], rounded to `dtype`, float32 or bfloat16.

        Args:
            q: the weight, on the CPU.
            dtype: of the result.
            name: what errors call the weight.
            empty: is asked for the memory of the result.

        Raises:
            NonFiniteError: NaN, Inf or, of bfloat16, a number that it has no room for; names it,
                index and value.
        """
        numbers = empty(q.shape, dtype=dtype)
        dequantize_into(q, numbers)
        check_values(numbers, name)
        return numbers

    def _numbers(
        self, weights: Sequence[StoredWeight], names: Sequence[str], scratch: Allocator
    ) -> list[Tensor]:
        """The weights, those that are quantized decoded to float32."""
        return [
            self.decode(w, torch.float32, name=name, empty=scratch)
            if isinstance(w, QuantizedWeight)
            else w
            for w, name in zip(weights, names, strict=True)
        ]

    def compare(self, before: StoredWeight, after: StoredWeight) -> tuple[float, float]:
        """`moequant.formats.signal_and_noise` of weights [N, K] on the CPU."""
        return signal_and_noise(before, after)
