from __future__ import annotations

import errno
import hashlib
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from moequant.errors import MoequantError, UnsupportedError
from moequant.storage import headers, output_file
from moequant.storage.disk import fsync_directory, replace_file, sha256_of
from moequant.storage.headers import DTYPES, dtype_name
from moequant.storage.writer import ShardWriter, lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

ONE = [("t", "U8", (8,))]


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every bit pattern is good: what is written is bytes. Booleans have two."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def specs_of(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


def write_all(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    writer = ShardWriter(path, *lay_out(specs_of(tensors)))
    for name, tensor in reversed(tensors.items()):
        writer.write(name, tensor)
    return writer.finish()


def bits(tensor: Tensor) -> Tensor:
    """NaN equals nothing and -0 equals 0; bytes are what must agree."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(bits(one), bits(other))
    )


@pytest.fixture
def everything() -> dict[str, Tensor]:
    """Each dtype as an odd-sized matrix, a scalar and an empty tensor, small elements first."""
    torch.manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        tensors[f"{name}.matrix"] = random_tensor(dtype, 3, 5)
        tensors[f"{name}.scalar"] = random_tensor(dtype)
        tensors[f"{name}.empty"] = random_tensor(dtype, 0, 4)
    return tensors


def test_safetensors_reads_what_we_wrote(tmp_path: Path, everything: dict[str, Tensor]) -> None:
    path = tmp_path / "shard"
    size, digest = write_all(path, everything)
    loaded = load_file(path)
    assert loaded.keys() == everything.keys()
    assert [name for name in everything if not same(loaded[name], everything[name])] == []
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert size == path.stat().st_size
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_size_is_known_before_any_data(tmp_path: Path, everything: dict[str, Tensor]) -> None:
    header, slots = lay_out(specs_of(everything))
    size, _ = write_all(tmp_path / "shard", everything)
    assert size == len(header) + sum(slot.size_bytes for slot in slots.values())


def test_file_is_the_one_safetensors_would_write(tmp_path: Path) -> None:
    # Names in order and one dtype a size: nothing is left to the order inside a size.
    tensors = {
        "a": random_tensor(torch.uint8, 3),
        "b": random_tensor(torch.bfloat16, 3, 1),
        "c": random_tensor(torch.int64, 2),
        "d": random_tensor(torch.uint8, 2),
        "e": random_tensor(torch.float32),
    }
    write_all(tmp_path / "shard", tensors)
    theirs = save(tensors, metadata={"format": "pt"})
    length = int.from_bytes(theirs[:8], "little")
    spaces = -(8 + length) % 4096  # our data starts a page
    start = (length + spaces).to_bytes(8, "little")
    ours = start + theirs[8 : 8 + length] + b" " * spaces + theirs[8 + length :]
    assert (tmp_path / "shard").read_bytes() == ours


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 9)), max_size=12))
def test_layout_has_no_holes_and_aligns_every_tensor(specs: list[tuple[str, int]]) -> None:
    header, slots = lay_out([(f"t{i}", dtype, (n,)) for i, (dtype, n) in enumerate(specs)])
    assert len(header) % 8 == 0
    position = len(header)
    for slot in slots.values():
        assert slot.start == position
        assert slot.start % DTYPES[slot.dtype].itemsize == 0
        position += slot.size_bytes


def test_layout_keeps_the_given_order_within_a_size() -> None:
    _, slots = lay_out([("z", "BF16", (1,)), ("b", "U8", (1,)), ("a", "F16", (1,))])
    assert list(slots) == ["z", "a", "b"]


def test_header_safetensors_would_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 50)
    with pytest.raises(UnsupportedError, match="smaller --max-shard-size"):
        lay_out(ONE)


def test_strided_tensor_is_written_in_row_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write_all(tmp_path / "shard", {"t": tensor})
    assert torch.equal(load_file(tmp_path / "shard")["t"], tensor)


def test_slices_from_many_threads_make_up_the_file(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_tensor(torch.bfloat16, 64, 33) for i in range(8)}
    writer = ShardWriter(tmp_path / "shard", *lay_out(specs_of(tensors)))
    pieces = [(name, at) for name in tensors for at in range(0, 64 * 66, 100)]

    def write(piece: tuple[str, int]) -> None:
        name, at = piece
        writer.write_bytes(name, at, bits(tensors[name])[at : at + 100].numpy())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, reversed(pieces)))
    writer.finish()
    loaded = load_file(tmp_path / "shard")
    assert [name for name in tensors if not same(loaded[name], tensors[name])] == []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Position and bytes of every `os.pwrite`."""
    found, whole = [], os.pwrite

    def pwrite(fd: int, view: memoryview, at: int) -> int:
        found.append((at, view.nbytes))
        return whole(fd, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return found


def test_tensors_that_follow_one_another_are_written_in_one_call(
    tmp_path: Path, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Past the cache small pieces are gathered.
    monkeypatch.setattr(output_file, "open_direct", lambda *_: None)
    memory = random_tensor(torch.uint8, 96)
    tensors = {
        "a": memory[:32].view(torch.int16),
        "b": memory[32:64],
        "away": memory[32:64].clone(),
        "none": torch.empty(0, dtype=torch.uint8),
        "c": memory[64:96].view(4, 8),
    }
    header, slots = lay_out(specs_of(tensors))
    writer = ShardWriter(tmp_path / "shard", header, slots)
    writer.write_all(dict(reversed(tensors.items())))
    writer.finish()
    assert [(at - len(header), count) for at, count in calls if at] == [(0, 64), (64, 32), (96, 32)]
    loaded = load_file(tmp_path / "shard")
    assert [name for name in tensors if not same(loaded[name], tensors[name])] == []


def test_memory_is_released_once_the_digest_has_all_of_it(tmp_path: Path) -> None:
    large = {name: random_tensor(torch.uint8, 1 << 16) for name in "abc"}
    tensors = large | {"small": random_tensor(torch.uint8, 8)}
    writer = ShardWriter(tmp_path / "shard", *lay_out(specs_of(tensors)))
    released: list[str] = []
    rest = {name: tensors[name] for name in ("c", "b", "small")}
    writer.write_all(rest, lambda: released.append("rest"))
    writer.digest(1 << 20)
    assert released == []
    writer.write_all({"a": tensors["a"]}, lambda: released.append("a"))
    assert released == []
    writer.digest(1 << 17)
    assert released == ["a"]
    _, sha256 = writer.finish()
    assert released == ["a", "rest"]
    assert sha256 == hashlib.sha256((tmp_path / "shard").read_bytes()).hexdigest()


def test_memory_that_is_too_little_to_keep_is_released_when_it_is_written(tmp_path: Path) -> None:
    tensors = {"t": random_tensor(torch.uint8, 8)}
    writer = ShardWriter(tmp_path / "shard", *lay_out(specs_of(tensors)))
    released: list[int] = []
    writer.write_all(tensors, lambda: released.append(1))
    assert released == [1]
    writer.finish()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: whole(fd, view[:7], at))
    tensor = random_tensor(torch.float32, 50)
    write_all(tmp_path / "shard", {"t": tensor})
    assert same(load_file(tmp_path / "shard")["t"], tensor)


@pytest.mark.parametrize(
    "pieces",
    [[], [(0, 4)], [(4, 4)], [(0, 4), (0, 4)], [(0, 5), (4, 4)], [(0, 8), (0, 8)]],
    ids=["nothing", "half", "other half", "half twice", "overlap", "twice"],
)
def test_file_that_was_not_written_once_is_not_finished(
    tmp_path: Path, pieces: list[tuple[int, int]]
) -> None:
    writer = ShardWriter(tmp_path / "shard", *lay_out(ONE))
    for offset, count in pieces:
        writer.write_bytes("t", offset, bytes(count))
    with pytest.raises(AssertionError, match="t: "):
        writer.finish()
    writer.abort()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(8, dtype=torch.int8), torch.zeros((2, 4), dtype=torch.uint8)]
)
def test_tensor_that_is_not_the_planned_one_is_not_written(tmp_path: Path, tensor: Tensor) -> None:
    writer = ShardWriter(tmp_path / "shard", *lay_out(ONE))
    with pytest.raises(AssertionError, match=r"t: .*the plan says"):
        writer.write("t", tensor)
    writer.abort()


@pytest.mark.parametrize("offset", [-1, 1, 9])
def test_bytes_beside_the_slot_are_not_written(tmp_path: Path, offset: int) -> None:
    writer = ShardWriter(tmp_path / "shard", *lay_out([*ONE, ("u", "U8", (8,))]))
    with pytest.raises(AssertionError, match="of 8"):
        writer.write_bytes("t", offset, bytes(8))
    writer.abort()


def test_abort_leaves_nothing(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    writer = ShardWriter(tmp_path / "shard", *lay_out(ONE))
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    with pytest.raises(AssertionError, match="already closed"):
        writer.write_bytes("t", 0, bytes(8))


def test_what_a_killed_run_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"x" * 10_000)
    size, digest = write_all(tmp_path / "shard", {"t": torch.zeros(8, dtype=torch.uint8)})
    (tmp_path / "shard").unlink()
    assert (size, digest) == write_all(tmp_path / "shard", {"t": torch.zeros(8, dtype=torch.uint8)})


def failing(code: int) -> Any:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_full_disk_shows_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(MoequantError, match=r"cannot be given its \d+ bytes: No space.*free space"):
        ShardWriter(tmp_path / "shard", *lay_out(ONE))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_that_cannot_reserve_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(code))
    tensor = random_tensor(torch.uint8, 8)
    write_all(tmp_path / "shard", {"t": tensor})
    assert same(load_file(tmp_path / "shard")["t"], tensor)


@pytest.mark.parametrize(
    ("call", "code", "advice"),
    [
        ("pwrite", errno.ENOSPC, "free space"),
        ("pwrite", errno.EDQUOT, "free space"),
        ("pwrite", errno.EIO, "system's log"),
        ("fsync", errno.EIO, "system's log"),
        ("open", errno.EROFS, "you may write to"),
        ("open", errno.EMFILE, "fix the cause"),
    ],
)
def test_failing_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, advice: str
) -> None:
    monkeypatch.setattr(os, call, failing(code))
    with pytest.raises(MoequantError, match=advice):
        write_all(tmp_path / "shard", {"t": torch.zeros(2)})


def test_limit_on_file_size_is_explained(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(MoequantError, match="smaller --max-shard-size"):
            ShardWriter(tmp_path / "shard", *lay_out([("t", "U8", (5000,))]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoequantError, match="cannot be created: No such file"):
        ShardWriter(tmp_path / "missing" / "shard", *lay_out(ONE))


def test_replaced_file_is_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_failed_replacement_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(errno.ENOSPC))
        with pytest.raises(MoequantError, match="cannot be written: No space"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_directory_fsync_the_file_system_lacks_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    fsync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(MoequantError, match="cannot be synced to disk"):
        fsync_directory(tmp_path)


def test_digest_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MoequantError, match="cannot be read"):
        sha256_of(tmp_path / "missing")
