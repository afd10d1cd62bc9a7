"""A conversion killed at any moment continues to the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moequant.conversion import convert
from moequant.errors import MoequantError

SHARDS = "1MB"

# Runs a conversion in which one function kills the process, with SIGKILL, on its n-th call.
KILLED = """
import os, signal, sys, threading
from importlib import import_module
from moequant.conversion import convert

source, output, module, owner, function, calls, when = sys.argv[1:]
place = import_module(module)
place = getattr(place, owner) if owner else place
original, left, lock = getattr(place, function), int(calls), threading.Lock()

def deadly(*args, **kwargs):
    global left
    with lock:
        left -= 1
        last = left == 0
    if last and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args, **kwargs)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(place, function, deadly)
convert(source, output, format="nvfp4", max_shard_size="1MB", workers=2)
"""

MOMENTS = {
    "inside the first shard": (
        "moequant.storage.writer",
        "ShardWriter",
        "write_all",
        1,
        "after",
    ),
    "inside a later shard": ("moequant.storage.writer", "ShardWriter", "write_all", 9, "after"),
    "inside a copied tensor": (
        "moequant.storage.writer",
        "ShardWriter",
        "write_bytes",
        2,
        "before",
    ),
    "before a shard has its name": (
        "moequant.conversion.journal",
        "Journal",
        "record",
        2,
        "before",
    ),
    "between two shards": ("moequant.conversion.journal", "Journal", "record", 2, "after"),
    "after the last shard": ("moequant.conversion.planned_conversion", "", "commit", 1, "before"),
    "before the shards move": ("moequant.conversion.commit", "", "_move", 2, "before"),
    "before the index": ("moequant.conversion.commit", "", "_move", 3, "before"),
    "before the config": ("moequant.conversion.commit", "", "_move", 4, "before"),
    "after the config": ("moequant.conversion.commit", "", "_move", 4, "after"),
}


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    return snapshot(convert(source, out, format="nvfp4", max_shard_size=SHARDS).output)


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def run_killed(source, output, moment):
    module, owner, function, calls, when = moment
    command = [sys.executable, "-c", KILLED, str(source), str(output), module, owner, function]
    done = subprocess.run(
        [*command, str(calls), when], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_killed_conversion_continues_to_the_same_bytes(source, whole, tmp_path, moment):
    out = tmp_path / "out"
    run_killed(source, out, moment)
    left_over = snapshot(out)
    if "config.json" in left_over:
        assert moment is MOMENTS["after the config"]
        assert {name: left_over[name] for name in whole} == whole
    finished = list((out / ".moequant" / "shards").glob("*.safetensors"))
    # A new file may get the inode of one that was removed, but not its time.
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in finished}
    result = convert(source, out, format="nvfp4", max_shard_size=SHARDS)
    assert result.state == "converted"
    assert snapshot(out) == whole
    # Finished shards were moved, not written again.
    after = {name: (out / name).stat() for name in before}
    recorded = {n for n, s in after.items() if (s.st_ino, s.st_mtime_ns) == before[n]}
    assert result.resumed_shards >= len(recorded)
    assert result.resumed_shards >= len(before) - 1


def test_a_finished_shard_that_was_damaged_since_is_written_again(source, whole, tmp_path):
    out = tmp_path / "out"
    run_killed(source, out, MOMENTS["after the last shard"])
    shard = min((out / ".moequant" / "shards").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    result = convert(source, out, format="nvfp4", max_shard_size=SHARDS)
    assert result.resumed_shards == len(result.plan.shards) - 1
    assert snapshot(out) == whole


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        '{"file": "x"}',
        *(pytest.param(d, marks=pytest.mark.full) for d in ("", "[1]", "\x00\xff")),
    ],
)
def test_a_torn_journal_costs_work_but_no_bytes(source, whole, tmp_path, damage):
    out = tmp_path / "out"
    run_killed(source, out, MOMENTS["between two shards"])
    journal = out / ".moequant" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]) + lines[-1][:20] + damage)
    result = convert(source, out, format="nvfp4", max_shard_size=SHARDS)
    assert result.resumed_shards == len(lines) - 1
    assert snapshot(out) == whole


def test_an_unfinished_conversion_is_not_continued_with_other_settings(source, whole, tmp_path):
    out = tmp_path / "out"
    run_killed(source, out, MOMENTS["between two shards"])
    before = snapshot(out)
    with pytest.raises(MoequantError, match="unfinished conversion"):
        convert(source, out, format="mxfp4", max_shard_size=SHARDS)
    assert snapshot(out) == before
    convert(source, out, format="nvfp4", max_shard_size=SHARDS, overwrite=True)
    assert snapshot(out) == whole


def test_a_source_that_changed_since_is_not_mixed_in(source, tmp_path):
    import shutil

    own, out = Path(shutil.copytree(source, tmp_path / "source")), tmp_path / "out"
    run_killed(own, out, MOMENTS["between two shards"])
    shard = max(own.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(MoequantError, match=rf"{shard.name}: changed since"):
        convert(own, out, format="nvfp4", max_shard_size=SHARDS)
    result = convert(own, out, format="nvfp4", max_shard_size=SHARDS, overwrite=True)
    assert result.resumed_shards == 0


def test_overwriting_keeps_the_old_output_until_the_new_one_is_whole(source, whole, tmp_path):
    out = tmp_path / "out"
    convert(source, out, format="mxfp4", max_shard_size=SHARDS)
    old = snapshot(out)
    code = KILLED.replace("workers=2", "workers=2, overwrite=True")
    module, owner, function, calls, when = MOMENTS["between two shards"]
    arguments = [str(source), str(out), module, owner, function, str(calls), when]
    subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=120)
    left = snapshot(out)
    assert {name: left[name] for name in old} == old
    # The same command without --overwrite goes on: consent was given when it began.
    result = convert(source, out, format="nvfp4", max_shard_size=SHARDS)
    assert result.resumed_shards > 0
    assert snapshot(out) == whole


def test_ctrl_c_leaves_a_state_that_continues(source, whole, tmp_path):
    out = tmp_path / "out"
    code = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), 2)")
    # A shell has what it starts in the background, such as these tests, ignore Ctrl-C.
    code = "import signal; signal.signal(2, signal.default_int_handler)" + code
    module, owner, function, calls, when = MOMENTS["inside a later shard"]
    arguments = [str(source), str(out), module, owner, function, str(calls), when]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert not list(out.rglob("*.partial"))
    assert json.loads((out / ".moequant" / "plan.json").read_text())["plan_sha256"]
    assert convert(source, out, format="nvfp4", max_shard_size=SHARDS).resumed_shards > 0
    assert snapshot(out) == whole
