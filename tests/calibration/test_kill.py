"""kill -9 at any moment, or a fault of the disk, then the same command: the same bytes."""

from __future__ import annotations

import errno
import random
import time

import pytest

from moequant.errors import StatisticsError
from moequant.statistics import Statistics

SETTINGS = {"window_tokens": 64, "batch_tokens": 80, "hessian": True}


@pytest.fixture(scope="module")
def whole(struck, save, dataset, tmp_path_factory):
    """The calls of a run that change the disk, and its output."""
    out = tmp_path_factory.mktemp("whole") / "stats"
    answer = struck(save("qwen3_moe"), dataset, out, **SETTINGS)
    assert answer["state"] == "calibrated", answer
    return answer["calls"], out.read_bytes()


def check_nothing_looks_whole(folder, wanted):
    """Every file in the folder is the finished one, or refused by the reader."""
    for path in folder.rglob("*"):
        if path.is_file() and path.read_bytes() != wanted:
            with pytest.raises(StatisticsError):
                Statistics.load(path)


def finish(struck, source, dataset, out, wanted):
    answer = struck(source, dataset, out, **SETTINGS)
    assert answer.get("state") in ("calibrated", "already calibrated"), answer
    assert out.read_bytes() == wanted
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return answer


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.full)])
def test_killed_before_any_call_that_changes_the_disk(
    struck, save, dataset, whole, tmp_path, stride
):
    calls, wanted = whole
    source, resumed = save("qwen3_moe"), set()
    for number in range(1, len(calls) + 1, stride):
        out = tmp_path / str(number) / "stats"
        out.parent.mkdir()
        fault = {"at": number, "kill": True}
        assert struck(source, dataset, out, fault, **SETTINGS) == {"killed": True}
        check_nothing_looks_whole(out.parent, wanted)
        resumed.add(finish(struck, source, dataset, out, wanted)["resumed"])
    assert resumed == {0, 1, 2, 3} if stride == 1 else resumed >= {0, 1, 2}


def test_killed_ten_times_at_random_moments(struck, save, dataset, whole, tmp_path):
    _, wanted = whole
    source, out, rng = save("qwen3_moe"), tmp_path / "stats", random.Random(5)  # noqa: S311
    (tmp_path / "timed").mkdir()
    started = time.monotonic()
    struck(source, dataset, tmp_path / "timed" / "stats", **SETTINGS)
    seconds = time.monotonic() - started
    (tmp_path / "timed" / "stats").unlink()
    (tmp_path / "timed").rmdir()
    kills = 0
    for _ in range(60):
        answer = struck(source, dataset, out, {"after": rng.uniform(0, seconds)}, **SETTINGS)
        kills += "killed" in answer
        check_nothing_looks_whole(tmp_path, wanted)
        if out.exists() and kills < 10:
            out.unlink()
        if kills == 10:
            break
    assert kills == 10
    finish(struck, source, dataset, out, wanted)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_fault_of_the_disk_is_an_error_and_loses_nothing(
    struck, save, dataset, whole, tmp_path, code
):
    calls, wanted = whole
    source = save("qwen3_moe")
    for number in range(1, len(calls) + 1, 23):
        out = tmp_path / str(number) / "stats"
        out.parent.mkdir()
        answer = struck(source, dataset, out, {"at": number, "errno": code}, **SETTINGS)
        if "error" in answer:
            assert answer["error"] == "MoequantError", answer
            assert str(out.parent) in answer["message"]
        check_nothing_looks_whole(out.parent, wanted)
        finish(struck, source, dataset, out, wanted)
