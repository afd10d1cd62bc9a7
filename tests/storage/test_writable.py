from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from moequant.errors import MoequantError
from moequant.storage.disk import check_writable

if TYPE_CHECKING:
    from pathlib import Path


def test_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


def test_asking_leaves_the_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"old")
    check_writable(tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_bytes() == b"old"


def test_asking_leaves_what_another_process_writes(tmp_path: Path) -> None:
    (tmp_path / ".run.json.partial").write_bytes(b"half")
    check_writable(tmp_path / "run.json")
    assert (tmp_path / ".run.json.partial").read_bytes() == b"half"


def test_a_file_that_no_right_allows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MoequantError, match=r"x\.json: cannot be written: Read-only file system;"):
        check_writable(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("folder", "exists and is not a file"),
        ("pipe", "exists and is not a file"),
        ("no/x.json", "No such file or directory; check the path, or choose another"),
        ("file/x.json", "Not a directory"),
        ("x" * 250, "File name too long"),  # with what is added while it is written
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_in_the_way_is_named(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MoequantError, match=why):
        check_writable(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file", "pipe"}
