"""A benchmark that disk or memory cannot hold is refused before anything is written."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from moequant.benchmarks import room
from moequant.benchmarks.conversion import bench_conversion
from moequant.benchmarks.moe_checkpoint import EXPERT_BYTES, Extent, write_moe_checkpoint
from moequant.benchmarks.room import available_memory, check_room, need_of
from moequant.conversion import convert
from moequant.errors import MoequantError, UnsupportedError
from moequant.storage.checkpoint import Checkpoint

SETTINGS = {"workers": 2, "rounds": 1}


@pytest.fixture
def endless(monkeypatch):
    """A disk that holds everything."""
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 80))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 10**9))
    with pytest.raises(
        MoequantError, match=r"4\.00 GB free, but 4\.5\d GB are needed: 3\.0\d GB .* 1\.5\d GB for"
    ):
        bench_conversion(["mxfp4", "fp8_block"], size_bytes=3 * 10**9, folder=tmp_path, **SETTINGS)
    assert not list(tmp_path.iterdir())
    check_room(*measures(3 * 10**9, ["mxfp4"]), tmp_path)


def test_this_machine_does_not_hold_99999_gb(tmp_path):
    with pytest.raises(MoequantError, match=r"GB free, but 1\d\d,\d\d\d\.\d\d GB are needed"):
        bench_conversion(["fp8_block"], size_bytes=99999 * 10**9, folder=tmp_path, **SETTINGS)
    assert not list(tmp_path.iterdir())


def measures(size_bytes, formats, *, others=False):
    extent = Extent.of(size_bytes)
    return extent, need_of(extent, formats, workers=1, others=others)


def test_memory_that_is_too_small_is_named(tmp_path, monkeypatch, endless):
    monkeypatch.setattr(room, "available_memory", lambda: 10**9)
    check_room(*measures(10**9, ["mxfp4"]), tmp_path)
    with pytest.raises(MoequantError, match=r"1\.00 GB of memory available, but \d\.\d\d GB are"):
        check_room(*measures(10**12, ["mxfp4"]), tmp_path)
    with pytest.raises(MoequantError, match=r"1\.00 GB of memory available, but 3\.9\d GB are"):
        check_room(*measures(10**9, ["mxfp4"], others=True), tmp_path)


def test_files_that_lie_in_memory_count_as_memory(tmp_path, monkeypatch, endless):
    monkeypatch.setattr(room, "available_memory", lambda: 15 * 10**8)
    extent, need = measures(10**9, ["fp8_block"])
    assert need.disk_bytes > 1.5e9
    check_room(extent, need, tmp_path)
    monkeypatch.setattr(room, "_is_memory", lambda place: True)
    with pytest.raises(MoequantError, match=r"and for the files, which .* keeps in memory"):
        check_room(extent, need, tmp_path)


def test_a_file_system_in_memory_is_known(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    line = f"25 24 {os.major(device)}:{os.minor(device)} / /tmp rw shared:1 - {{}} none rw\n"
    monkeypatch.setattr(room, "_MOUNTS", mounts)
    assert not room._is_memory(tmp_path)
    for kind, kept in {"ext4": False, "tmpfs": True}.items():
        mounts.write_text(line.format(kind))
        assert room._is_memory(tmp_path) == kept


def test_more_tensors_than_a_header_names_are_refused(tmp_path, monkeypatch, endless):
    monkeypatch.setattr(room, "available_memory", lambda: 1 << 80)
    with pytest.raises(UnsupportedError, match="names at most 625000"):
        check_room(*measures(4 * 10**12, ["mxfp4"]), tmp_path)


def test_a_group_that_limits_memory_counts(monkeypatch):
    assert 0 < available_memory() < 1 << 50
    monkeypatch.setattr(room, "_left_in_group", lambda: [1000])
    assert available_memory() == 1000


def test_the_need_is_an_upper_bound_and_no_large_one(tmp_path, every_format):
    """Within 8 KB: what names and index take less than the bound, and a page that is begun."""
    size_bytes = 2 * EXPERT_BYTES
    extent, need = measures(size_bytes, [every_format])
    assert extent.expert_bytes == write_moe_checkpoint(tmp_path / "source", size_bytes)
    source = Checkpoint.open(tmp_path / "source")
    assert len(source.tensors) == extent.tensors
    kept = [t.size_bytes for n, t in source.tensors.items() if ".experts." not in n]
    assert sum(kept) == extent.kept_bytes
    (weights,) = source.file_bytes.values()
    assert 0 <= need.input_bytes - weights < 8192
    written = convert(tmp_path / "source", tmp_path / "out", format=every_format).output
    assert 0 <= need.output_bytes - size_of(written) < 8192
