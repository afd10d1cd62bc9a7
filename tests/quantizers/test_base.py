"""Memory that quantizers give."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from moequant.quantizers import Quantizer

MIB = 1 << 20


@pytest.mark.parametrize(
    "size_bytes",
    [0, 1, MIB - 1, MIB, 3 * MIB // 2 - 1, 3 * MIB // 2, 2 * MIB, 6 * MIB + 4096, 8 * MIB - 1],
)
def test_memory_is_as_much_as_was_asked_for_or_little_more(size_bytes: int) -> None:
    memory = Quantizer().allocate(size_bytes)
    assert memory.dtype == torch.uint8
    assert size_bytes <= len(memory) <= size_bytes + MIB // 2
    assert (memory.fill_(7) == 7).all()


def test_memory_is_good_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    memory = Quantizer().allocate(2 * MIB - 1)
    assert len(memory) == 2 * MIB - 1
    assert (memory.fill_(7) == 7).all()


def test_too_little_memory_is_not_taken_for_a_fault_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="4194304 bytes: Cannot allocate memory"):
        Quantizer().allocate(4 * MIB)
