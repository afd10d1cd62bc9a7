from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from moequant.kernels.cubin_cache import cached_cubin


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


def test_a_folder_that_cannot_be_written_costs_compiling_again(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path / "file"))
    compiler = Compiler()
    assert [cached_cubin("a", compiler) for _ in range(2)] == [b"code"] * 2
    assert compiler.calls == 2


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert cached_cubin("a", Compiler()) == b"code"
    assert list(folder.iterdir()) == []
