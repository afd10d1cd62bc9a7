"""A folder has one holder, and a holder that dies or removes the folder keeps nobody out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moequant.errors import MoequantError
from moequant.storage.lock import exclusive


def test_a_second_run_is_refused_until_the_first_is_done(tmp_path):
    folder = tmp_path / "deep" / "work"
    with (
        exclusive(folder, "conversion"),
        pytest.raises(MoequantError, match=r"work: another conversion is running here"),
        exclusive(folder, "conversion"),
    ):
        pytest.fail("two runs hold one folder")
    with exclusive(folder, "conversion"):
        assert (folder / "lock").is_file()


def test_a_failure_gives_the_folder_free(tmp_path):
    with pytest.raises(ValueError, match="mine"), exclusive(tmp_path, "conversion"):
        raise ValueError("mine")
    with exclusive(tmp_path, "conversion"):
        pass


def test_a_process_that_dies_gives_the_folder_free(tmp_path):
    code = (
        "import os, pathlib, sys; from moequant.storage.lock import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1]), 'conversion'): os._exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == 7
    with exclusive(tmp_path, "conversion"):
        pass


def test_a_holder_may_remove_the_folder(tmp_path):
    folder = tmp_path / "work"
    with exclusive(folder, "conversion"):
        shutil.rmtree(folder)
        with exclusive(folder, "conversion"):
            assert (folder / "lock").is_file()


@pytest.mark.parametrize("successor", [False, True])
def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch, successor):
    # What happens if the holder removes its folder between our open and our flock.
    opened = os.open

    def open_and_lose(path, *arguments):
        descriptor = opened(path, *arguments)
        path.unlink()
        if successor:
            os.close(opened(path, os.O_CREAT))
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    with pytest.raises(MoequantError, match="another"), exclusive(tmp_path, "conversion"):
        pytest.fail("the file locked is not the one at its path")


def test_a_folder_that_is_removed_as_it_is_asked_for_is_another_runs(tmp_path, monkeypatch):
    opened = os.open

    def lose_and_open(path, *arguments):
        path.parent.rmdir()
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", lose_and_open)
    with pytest.raises(MoequantError, match="another"), exclusive(tmp_path / "w", "conversion"):
        pytest.fail("there is no folder")


@pytest.mark.parametrize("made_again", [False, True])
def test_a_folder_that_is_removed_as_it_is_made_is_another_runs(tmp_path, monkeypatch, made_again):
    folder = tmp_path / "work"
    folder.mkdir()
    is_dir = Path.is_dir

    def lose(path):
        # As `mkdir` asks whether what is in its way is a folder.
        monkeypatch.setattr(Path, "is_dir", is_dir)
        folder.rmdir()
        found = is_dir(path)
        if made_again:
            folder.mkdir()
        return found

    monkeypatch.setattr(Path, "is_dir", lose)
    with pytest.raises(MoequantError, match="another"), exclusive(folder, "conversion"):
        pytest.fail("the folder is not ours")


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, said in (
        ("link/work", r"work: cannot be created: File exists; move away what is there"),
        ("file/work", r"work: cannot be created: Not a directory; a part of this path is a file"),
        ("file", r"file: cannot be created: File exists; move away what is there"),
    ):
        with (
            pytest.raises(MoequantError, match=said),
            exclusive(tmp_path / path, "conversion"),
        ):
            pytest.fail("there is no folder")
