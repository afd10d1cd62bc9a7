"""kill -9 at any moment, then the same command: the same bytes, and nothing is done twice."""

from __future__ import annotations

import json
import random
import shutil
import time

import pytest

from moequant.formats import CONVERTIBLE

SETTINGS = {"format": "nvfp4", "max_shard_size": "300KB", "workers": 1}


@pytest.fixture(scope="module")
def whole(struck, small_source, tmp_path_factory):
    """The output of a run that nothing struck, and how many calls it makes that change the disk."""
    out = tmp_path_factory.mktemp("whole") / "out"
    answer = struck(small_source, out, **SETTINGS)
    return answer["calls"], out


def finish(struck, source, out, left, contents, whole, **settings):
    """Run the same command to its end and check what it made of what was left."""
    before = left(out)
    answer = struck(source, out, **settings)
    assert "error" not in answer, answer
    assert contents(out) == whole
    assert answer["resumed"] == len(before.finished) or answer["state"] == "already converted"
    after = left(out)
    assert {file: after.identity(file) for file in before.finished} == before.finished


@pytest.mark.parametrize(
    ("overwrite", "stride"),
    [
        (False, 3),
        (True, 8),
        pytest.param(False, 1, marks=pytest.mark.full),
        pytest.param(True, 1, marks=pytest.mark.full),
    ],
)
def test_killed_before_any_call_that_changes_the_disk(
    struck, small_source, whole, tmp_path, left, contents, overwrite, stride
):
    calls, folder = whole
    wanted, out, old = contents(folder), tmp_path / "out", tmp_path / "old"
    settings = SETTINGS | ({"overwrite": True} if overwrite else {})
    before = None
    if overwrite:
        struck(small_source, old, **SETTINGS | {"format": "mxfp4"})
        before = contents(old)
    number, killed = 1 - stride, True
    while killed:
        number += stride
        shutil.rmtree(out, ignore_errors=True)
        if overwrite:
            shutil.copytree(old, out)
        killed = "killed" in struck(small_source, out, {"at": number, "kill": True}, **settings)
        if out.exists():
            left(out).check_nothing_looks_whole(wanted, before)
        if killed:
            finish(struck, small_source, out, left, contents, wanted, **settings)
    assert number > len(calls)
    assert contents(out) == wanted


def test_killed_before_any_write_past_the_cache(
    struck, large_source, tmp_path, left, contents, past_cache
):
    calls = struck(large_source, tmp_path / "whole", **SETTINGS)["calls"]
    wanted, out = contents(tmp_path / "whole"), tmp_path / "out"
    for number in past_cache(calls):
        shutil.rmtree(out, ignore_errors=True)
        assert struck(large_source, out, {"at": number, "kill": True}, **SETTINGS) == {
            "killed": True
        }
        left(out).check_nothing_looks_whole(wanted)
        finish(struck, large_source, out, left, contents, wanted, **SETTINGS)


@pytest.fixture(scope="module")
def source(make_checkpoint):
    """5 MB; a conversion takes a tenth of a second."""
    return make_checkpoint()


def kill_at_random(struck, source, tmp_path, left, contents, format, kills):
    settings = {"format": format, "max_shard_size": "500KB"}
    struck(source, tmp_path / "warm", **settings)
    started = time.monotonic()
    assert struck(source, tmp_path / "whole", workers=2, **settings)["state"] == "converted"
    seconds = time.monotonic() - started
    wanted, out, rng = contents(tmp_path / "whole"), tmp_path / "out", random.Random(format)  # noqa: S311
    done = 0
    while done < kills:
        # Half of the runs are killed in a first part of theirs, so that there are many.
        fault = {"after": rng.uniform(0, seconds) * rng.choice([1, 0.5])}
        answer = struck(source, out, fault, workers=rng.randint(1, 3), **settings)
        done += "killed" in answer
        if out.exists():
            left(out).check_nothing_looks_whole(wanted)
        if rng.random() < 0.4 or "killed" not in answer:
            if "killed" in answer:
                workers = rng.randint(1, 3)
                finish(struck, source, out, left, contents, wanted, workers=workers, **settings)
            assert contents(out) == wanted
            shutil.rmtree(out)


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_killed_at_random_moments(struck, source, tmp_path, left, contents, format):
    kill_at_random(struck, source, tmp_path, left, contents, format, kills=10)


@pytest.mark.full
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_killed_at_many_random_moments(struck, source, tmp_path, left, contents, format):
    kill_at_random(struck, source, tmp_path, left, contents, format, kills=100)


def lie_in_the_journal(key, value):
    def damage(shard):
        journal = shard.parent.parent / "journal.jsonl"
        entries = [json.loads(line) for line in journal.read_text().splitlines()]
        for entry in entries:
            if entry["file"] == shard.name:
                entry[key] = value
        journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    return damage


LIES = {
    "another digest": lie_in_the_journal("sha256", "0" * 64),
    "another size": lie_in_the_journal("bytes", 1),
    "another type": lie_in_the_journal("bytes", True),
    "a path": lie_in_the_journal("file", "../../../../etc/hostname"),
}


@pytest.fixture
def finished(struck, small_source, tmp_path, whole):
    """The output of a run that was killed when all its shards were finished, none in place."""
    calls, _ = whole
    last = max(i for i, call in enumerate(calls) if call == "posix_fallocate")
    commit = next(i for i in range(last, len(calls)) if calls[i] == "mkdir")
    out = tmp_path / "out"
    answer = struck(small_source, out, {"at": commit + 1, "kill": True}, **SETTINGS)
    assert answer == {"killed": True}
    return out


def test_no_shard_is_trusted_without_its_size_and_digest(
    struck, small_source, whole, finished, contents, damage
):
    shards = sorted((finished / ".moequant" / "shards").iterdir())
    damaged = damage(shards)
    answer = struck(small_source, finished, **SETTINGS)
    assert answer["resumed"] == len(shards) - damaged
    assert contents(finished) == contents(whole[1])


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_no_shard_is_trusted_by_a_journal_that_lies(
    struck, small_source, whole, finished, contents, lie
):
    shards = sorted((finished / ".moequant" / "shards").iterdir())
    lie(shards[0])
    answer = struck(small_source, finished, **SETTINGS)
    assert answer["resumed"] == len(shards) - 1
    assert contents(finished) == contents(whole[1])
