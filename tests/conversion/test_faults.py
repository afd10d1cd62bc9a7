"""Disks that fail, fill up or may not be written: a message with advice, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

SETTINGS = {"format": "nvfp4", "max_shard_size": "300KB", "workers": 1}
ADVICE = {
    errno.ENOSPC: "free space there or choose another output",
    errno.EIO: "the disk or its connection failed",
    errno.EROFS: "choose an output you may write to",
    errno.EACCES: "choose an output you may write to",
}


@pytest.fixture(scope="module")
def whole(struck, small_source, tmp_path_factory):
    """A run that nothing struck: the calls it makes that change the disk, and its output."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return struck(small_source, out, **SETTINGS)["calls"], out


def check_message(answer, out, code):
    assert (answer["error"], answer["exit_code"]) == ("MoequantError", 1), answer
    assert str(out) in answer["message"]
    assert os.strerror(code) in answer["message"]
    assert ADVICE[code] in answer["message"]


def sweep(struck, source, whole, tmp_path, left, contents, code, stride, lasting, numbers=None):
    """Strike every `stride`-th call in turn; each time the same command then goes on."""
    calls, folder = whole
    wanted, out = contents(folder), tmp_path / "out"
    struck_calls = 0
    for number in numbers or range(1, len(calls) + 1, stride):
        shutil.rmtree(out, ignore_errors=True)
        fault = {"at": number, "errno": code, "lasting": lasting}
        if lasting and calls[number - 1] not in TAKE_SPACE:
            continue
        answer = struck(source, out, fault, **SETTINGS)
        struck_calls += 1
        if "error" in answer:
            check_message(answer, out, code)
        if not out.exists():
            continue
        was = left(out)
        was.check_nothing_looks_whole(wanted)
        assert "error" in answer or was.files == wanted, calls[number - 1]
        if answer["calls"][number - 1] in TAKE_SPACE:
            # A full disk gets back what was not finished.
            assert not [name for name in was.files if name.endswith(".partial")]
        answer = struck(source, out, **SETTINGS)
        assert answer.get("state") in ("converted", "already converted"), answer
        assert contents(out) == wanted
        now = left(out)
        assert {file: now.identity(file) for file in was.finished} == was.finished
    assert struck_calls


TAKE_SPACE = (
    "open", "write", "pwrite", "pwritev", "posix_fallocate", "ftruncate", "mkdir", "direct_pwrite",
)  # fmt: skip


@pytest.mark.parametrize(("code", "lasting"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_any_write_past_the_cache_that_fails(
    struck, large_source, tmp_path, left, contents, past_cache, code, lasting
):
    folder = tmp_path / "whole"
    calls = struck(large_source, folder, **SETTINGS)["calls"]
    places = large_source, (calls, folder), tmp_path, left, contents
    sweep(struck, *places, code, 1, lasting, past_cache(calls))


def test_disk_that_is_full_from_any_call_on(struck, small_source, whole, tmp_path, left, contents):
    sweep(struck, small_source, whole, tmp_path, left, contents, errno.ENOSPC, 2, lasting=True)


@pytest.mark.full
def test_disk_that_is_full_from_every_call_on(
    struck, small_source, whole, tmp_path, left, contents
):
    sweep(struck, small_source, whole, tmp_path, left, contents, errno.ENOSPC, 1, lasting=True)


@pytest.mark.parametrize(("code", "stride"), [(errno.EIO, 3), (errno.EROFS, 9), (errno.EACCES, 9)])
def test_any_call_that_fails(struck, small_source, whole, tmp_path, left, contents, code, stride):
    sweep(struck, small_source, whole, tmp_path, left, contents, code, stride, lasting=False)


@pytest.mark.full
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES])
def test_every_call_that_fails(struck, small_source, whole, tmp_path, left, contents, code):
    sweep(struck, small_source, whole, tmp_path, left, contents, code, 1, lasting=False)


def test_full_disk_leaves_an_old_output_whole_until_the_new_one_is(
    struck, small_source, whole, tmp_path, contents
):
    wanted, out, old = contents(whole[1]), tmp_path / "out", tmp_path / "old"
    struck(small_source, old, **SETTINGS | {"format": "mxfp4"})
    before = contents(old)

    def overwrite(fault):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(old, out)
        return struck(small_source, out, fault, overwrite=True, **SETTINGS)

    calls = overwrite(None)["calls"]
    assert contents(out) == wanted
    # Neither a rename nor a removal takes space.
    numbers = [i for i, call in enumerate(calls, start=1) if call in TAKE_SPACE]
    # Of the writes into shards a few; of all that begins and commits a conversion each.
    for number in [n for i, n in enumerate(numbers) if calls[n - 1] != "pwrite" or i % 8 == 0]:
        answer = overwrite({"at": number, "errno": errno.ENOSPC, "lasting": True})
        now = contents(out)
        if "error" in answer:
            check_message(answer, out, errno.ENOSPC)
            assert {file: now.get(file) for file in before} == before
        else:
            assert now == wanted


NAMESPACE = """
import json, subprocess, sys
from pathlib import Path

from moequant.conversion import convert
from moequant.errors import MoequantError

source, mount, free = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", mount], check=True)
out = mount / "out"
settings = {"format": "nvfp4", "max_shard_size": "300KB", "workers": 2}


class Filling:
    \"\"\"Fills the disk but for `free` bytes, before the work or after it.\"\"\"

    def __init__(self, when):
        self.when = when

    def start(self, *_):
        self.strike("start")

    def advance(self, *_):
        pass

    def finish(self):
        self.strike("finish")

    def strike(self, moment):
        if moment == self.when:
            with (mount / "ballast").open("wb") as file:
                try:
                    while True:
                        file.write(bytes(4096))
                        file.flush()
                except OSError:
                    pass
                try:
                    file.truncate(max(0, file.tell() - free) // 4096 * 4096)
                except OSError:
                    pass


answers = []
for when in ("start", "finish", None):
    try:
        result = convert(source, out, progress=Filling(when) if when else None, **settings)
        answers.append(result.state)
    except MoequantError as error:
        answers.append(str(error))
    (mount / "ballast").unlink(missing_ok=True)
    listing = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    answers.append(listing)
answers.append({name: (out / name).read_bytes().hex() for name in listing})
subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
for folder in (mount / "other", out):
    try:
        answers.append(convert(source, folder, **settings).state)
    except MoequantError as error:
        answers.append(str(error))
(command,) = [[sys.executable, "-m", "moequant", "convert", source, str(mount / "cli")]]
done = subprocess.run([*command, "--format", "nvfp4"], capture_output=True, text=True)
answers.append([done.returncode, done.stderr])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def on_a_full_disk(tmp_path_factory):
    """on_a_full_disk(source, free): what happens on a small disk of its own, in a namespace."""
    unshare = shutil.which("unshare")
    probe = [unshare or "", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none"]
    mount = tmp_path_factory.mktemp("mount")
    if unshare is None or subprocess.run([*probe, mount], capture_output=True).returncode:
        pytest.skip("no user and mount namespaces here, in which to mount a small disk")

    def on_a_full_disk(source, free):
        command = [*probe[:4], sys.executable, "-c", NAMESPACE, str(source), str(mount), str(free)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return on_a_full_disk


@pytest.mark.parametrize("free", [0, pytest.param(100_000, marks=pytest.mark.full)])
def test_disk_that_is_really_full_and_one_that_is_read_only(
    on_a_full_disk, small_source, whole, contents, free
):
    answers = on_a_full_disk(small_source, free)
    full, after_full, in_commit, after_commit, state, _, written, elsewhere, finished, cli = answers
    wanted = {name: content.hex() for name, content in contents(whole[1]).items()}
    assert ADVICE[errno.ENOSPC] in full
    assert ADVICE[errno.ENOSPC] in in_commit
    for listing in (after_full, after_commit):
        assert all(name.startswith(".moequant/") for name in listing)
    assert len([f for f in after_commit if f.startswith(".moequant/shards/")]) == 3
    assert state == "converted"
    assert written == wanted
    assert ADVICE[errno.EROFS] in elsewhere
    assert finished == "already converted"
    assert cli[0] == 1
    assert "Traceback" not in cli[1]
    assert ADVICE[errno.EROFS] in cli[1]
