"""A source that changes under a run, or between two: named, and nothing of it is put in place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moequant.conversion import convert
from moequant.errors import CheckpointError, MoequantError
from moequant.progress import SilentProgress

SETTINGS = {"format": "nvfp4", "max_shard_size": "300KB", "workers": 2}
SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def own(small_source, tmp_path):
    """A copy of the source that a test may change."""
    return Path(shutil.copytree(small_source, tmp_path / "source"))


class Meanwhile(SilentProgress):
    """Does something to the source at the first or behind the last piece of work."""

    def __init__(self, action, moment):
        self._action = action
        self._moment = moment
        self._begun = False

    def advance(self, done_bytes, current):
        if self._moment == "at the first unit" and not self._begun:
            self._begun = True
            self._action()

    def finish(self):
        if self._moment == "behind the last unit":
            self._action()


def touch(path):
    os.utime(path, ns=(1, 1))


def rewrite(path):
    """Other bytes, as many."""
    content = path.read_bytes()
    if path.name == "config.json":
        path.write_bytes(content.replace(b"512", b"513"))
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    touch(path)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    with path.open("ab") as file:
        file.write(b" ")


def replace(path):
    other = path.with_name("fetched anew")
    other.write_bytes(path.read_bytes() + b"\n")
    other.replace(path)


def remove(path):
    path.unlink()


CHANGES = [rewrite, truncate, grow, replace, remove]


@pytest.mark.parametrize("moment", ["at the first unit", "behind the last unit"])
@pytest.mark.parametrize("file", [SHARD, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_under_the_run_is_named(own, tmp_path, contents, change, file, moment):
    out = tmp_path / "out"
    progress = Meanwhile(lambda: change(own / file), moment)
    with pytest.raises(CheckpointError) as caught:
        convert(own, out, progress=progress, **SETTINGS)
    assert str(own / file) in str(caught.value)
    assert caught.value.exit_code == 3
    assert all(name.startswith(".moequant/") for name in contents(out))
    # What was begun with the old source is not finished with the new one.
    if change is not remove or file != "tokenizer.json":
        reasons = "changed since|truncated|unaccounted|not valid JSON|cannot be read|: missing"
        with pytest.raises(MoequantError, match=reasons):
            convert(own, out, **SETTINGS)


def test_a_change_under_the_run_leaves_an_old_output_as_it_was(own, tmp_path, contents):
    out = tmp_path / "out"
    convert(own, out, **SETTINGS | {"format": "mxfp4"})
    before = contents(out)
    progress = Meanwhile(lambda: rewrite(own / "tokenizer.json"), "behind the last unit")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: changed while"):
        convert(own, out, overwrite=True, progress=progress, **SETTINGS)
    assert {name: content for name, content in contents(out).items() if name in before} == before


@pytest.mark.parametrize("file", [SHARD, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", [touch, rewrite, replace], ids=lambda change: change.__name__)
def test_a_change_between_two_runs_is_named(struck, own, tmp_path, change, file):
    out = tmp_path / "out"
    assert struck(own, out, {"at": 60, "kill": True}, **SETTINGS) == {"killed": True}
    if file == SHARD and change is replace:
        change = rewrite  # more bytes than its header speaks of are an error of their own
    change(own / file)
    with pytest.raises(MoequantError, match=rf"{file}: changed since the conversion .*--overwrite"):
        convert(own, out, **SETTINGS)
    assert convert(own, out, overwrite=True, **SETTINGS).resumed_shards == 0


def without_work(contents):
    return {name: c for name, c in contents.items() if not name.startswith(".moequant/")}


def test_what_stands_in_the_way_of_a_file_is_named_before_the_work(own, tmp_path, contents):
    out = tmp_path / "out"
    convert(own, out, **SETTINGS)
    for name, make in (
        ("templates", lambda path: path.write_text("a file")),
        ("tokenizer.json", lambda path: path.mkdir()),
        ("config.json", lambda path: path.mkdir()),
    ):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        before = without_work(contents(out))
        with pytest.raises(MoequantError, match=rf"{path}: in the way of .*; move it away"):
            convert(own, out, overwrite=True, **SETTINGS)
        assert without_work(contents(out)) == before
        path.unlink() if path.is_file() else path.rmdir()
    assert convert(own, out, overwrite=True, **SETTINGS).state == "converted"
