from __future__ import annotations

import gc
import weakref

import pytest
import torch

from moequant.storage.buffers import PAGE_BYTES, Arena, tensor_bytes
from moequant.storage.headers import DTYPES


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_view_is_the_memory_of_the_tensor(dtype: torch.dtype) -> None:
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(2, 3)
    view = tensor_bytes(tensor)
    assert view.tobytes() == bytes(range(raw.numel()))
    view[0] = 77
    assert raw[0] == 77


def test_view_begins_where_a_slice_does() -> None:
    assert tensor_bytes(torch.arange(8, dtype=torch.uint8)[3:5]).tobytes() == b"\x03\x04"


def test_scalar_and_empty_tensor_have_views() -> None:
    assert tensor_bytes(torch.tensor(1, dtype=torch.int16)).tobytes() == b"\x01\x00"
    assert tensor_bytes(torch.empty((0, 3), dtype=torch.float8_e4m3fn)).nbytes == 0


def test_view_outlives_the_name_of_its_tensor() -> None:
    view = tensor_bytes(torch.full((1 << 20,), 7, dtype=torch.uint8))
    gc.collect()
    other = torch.zeros(1 << 20, dtype=torch.uint8)
    assert view.tobytes() == b"\x07" * (1 << 20)
    assert not other.any()


def test_strided_tensor_is_no_caller_we_have() -> None:
    with pytest.raises(AssertionError):
        tensor_bytes(torch.zeros((2, 3)).T)


def test_an_arena_gives_the_same_memory_again():
    arena = Arena()
    places = []
    for _ in range(3):
        arena.clear()
        tensors = [arena.empty(shape, dtype=dtype) for shape, dtype in ARENA_SPECS]
        assert [(tuple(t.shape), t.dtype) for t in tensors] == ARENA_SPECS
        assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in tensors if t.numel())
        for fill, tensor in enumerate(tensors):
            tensor.view(torch.uint8).fill_(fill)
        assert all((t.view(torch.uint8) == i).all() for i, t in enumerate(tensors))
        places.append([t.data_ptr() for t in tensors if t.numel()])
    # The first round found out how much there must be.
    assert places[1] == places[2]


def test_an_arena_frees_its_memory_before_it_takes_more():
    held, most = [], []

    def allocate(size_bytes):
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        held.append(weakref.ref(memory))
        most.append(sum(len(m) for ref in held if (m := ref()) is not None))
        return memory

    arena = Arena(allocate)
    for size_bytes in (1000, 30_000, 20_000):
        tensors = [arena.empty((size_bytes // 2,), dtype=torch.uint8) for _ in range(2)]
        del tensors
        arena.clear()
        assert most[-1] == arena.size_bytes
    assert arena.size_bytes < 40_000


ARENA_SPECS = [
    ((3, 5), torch.bfloat16),
    ((0, 4), torch.float32),
    ((7,), torch.float8_e4m3fn),
    ((2, 2), torch.float32),
]


def test_an_arena_grows_to_the_largest_that_was_asked_and_keeps_it():
    arena = Arena()
    for size in (100, 1000, 10):
        arena.empty((size,), dtype=torch.uint8)
        arena.clear()
    small, large = (arena.empty((n,), dtype=torch.uint8) for n in (10, 900))
    assert large.data_ptr() == small.data_ptr() + 64


@pytest.mark.parametrize("position", [0, 64, 4096, 5056, 10**9 // 64 * 64])
def test_an_arena_begins_where_a_file_does_in_its_page(position: int) -> None:
    arena = Arena(size_bytes=1000)
    arena.begin_like(position)
    assert (arena.empty((1000,), dtype=torch.uint8).data_ptr() - position) % PAGE_BYTES == 0


@pytest.mark.parametrize("position", [1, 8, 4095])
def test_an_arena_stays_aligned_wherever_a_file_begins(position: int) -> None:
    arena = Arena(size_bytes=1000)
    arena.begin_like(position)
    for dtype in (torch.uint8, torch.float32, torch.int64):
        assert arena.empty((3,), dtype=dtype).data_ptr() % 64 == 0


def test_an_arena_has_the_same_tensors_again_and_keeps_few():
    arena = Arena(size_bytes=100_000)
    arena.begin_like(64)
    first = arena.empty((3, 5), dtype=torch.bfloat16)
    arena.clear()
    arena.begin_like(64)
    assert arena.empty((3, 5), dtype=torch.bfloat16) is first
    for size in range(1000):
        arena.clear()
        assert arena.empty((size,), dtype=torch.uint8).nbytes == size
    assert len(arena._views) <= 64
    arena.empty((200_000,), dtype=torch.uint8)
    arena.clear()
    assert arena._views == {}


def test_an_arena_takes_a_few_bytes_more_than_it_asked_for():
    arena = Arena(lambda size_bytes: torch.empty(size_bytes + 100, dtype=torch.uint8))
    assert arena.empty((30, 5), dtype=torch.bfloat16).shape == (30, 5)
    arena.clear()
    assert arena.size_bytes == 320 + PAGE_BYTES + 100
