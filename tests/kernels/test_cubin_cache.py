from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("triton")

from moequant.errors import MoequantError, SlowPathWarning
from moequant.kernels.cubin_cache import cache_dir, cached_cubin


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Compiler:
    """Makes b"code", and counts how often."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return b"code"


def test_a_cubin_is_compiled_once_for_each_key(folder):
    compiler = Compiler()
    assert [cached_cubin(key, compiler) for key in ("a", "a", "b")] == [b"code"] * 3
    assert compiler.calls == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[1:],
                                    lambda data: b"C" + data[1:]])  # fmt: skip
def test_a_damaged_cubin_is_compiled_again_and_replaced(folder, damage):
    compiler = Compiler()
    cached_cubin("a", compiler)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert [cached_cubin("a", compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.calls == 2


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_cubin_may_be_read_by_whom_the_umask_lets(folder, umask, mode):
    before = os.umask(umask)
    try:
        cached_cubin("a", Compiler())
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_cubin_that_cannot_be_read_is_compiled_again_and_replaced(folder, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied")

    compiler = Compiler()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        assert [cached_cubin("a", compiler) for _ in range(2)] == [b"code"] * 2
    assert cached_cubin("a", compiler) == b"code"
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_costs_compiling_again(tmp_path, monkeypatch):
    compiler = Compiler()
    for name in ("file", "other file"):
        (tmp_path / name).touch()
        monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path / name))
        why = rf"{name}: .* \(File exists\).* set MOEQUANT_CACHE_DIR to a folder"
        with pytest.warns(SlowPathWarning, match=why) as warned:
            assert [cached_cubin(key, compiler) for key in "aab"] == [b"code"] * 3
        assert len(warned) == 1
    assert compiler.calls == 6


def test_an_empty_variable_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", "")
    assert cache_dir() == tmp_path / ".cache" / "moequant"


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(SlowPathWarning, match="No space left on device"):
        assert cached_cubin("a", Compiler()) == b"code"
    assert list(folder.iterdir()) == []


def test_the_folder_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", "~/kernels")
    assert cache_dir() == Path("/home/someone/kernels")


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("MOEQUANT_CACHE_DIR", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as pathlib asks for it
    with pytest.raises(MoequantError, match="this user has no home folder; set MOEQUANT_CACHE_DIR"):
        cache_dir()
