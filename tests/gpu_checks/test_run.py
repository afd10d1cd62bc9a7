"""The queue, by commands of a few milliseconds on GPUs that are not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import run as module

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path, machine, monkeypatch, capsys):
    """run(tasks, *options, gpus=1): the exit code, results by task, and what was printed."""
    monkeypatch.setattr(module, "check_installed", lambda: True)
    out, folder = tmp_path / "out", tmp_path / "folder"

    def run(tasks, *options, gpus=1):
        words = ["--out", str(out), "--folder", str(folder), *map(str, options)]
        code = module.main(words, tasks, machine(gpus))
        return code, json.loads((out / "results.json").read_text())["tasks"], capsys.readouterr()[0]

    run.out, run.folder = out, folder
    return run


def statuses(results):
    return {name: result["status"] for name, result in results.items()}


def test_all_run_each_with_a_log_and_a_folder_of_its_own(run, tiny):
    tasks = [
        tiny("a", "echo first; echo last", "echo x > {out}/x.json"),
        tiny("b", "echo $CUDA_VISIBLE_DEVICES", "test $PYTHONSAFEPATH = 1", gpus=2),
    ]
    code, results, printed = run(tasks, gpus=2)
    assert (code, statuses(results)) == (0, {"a": "passed", "b": "passed"})
    assert {"first", "last"} <= set((run.out / "a" / "log").read_text().splitlines())
    assert (run.out / "a" / "x.json").read_text() == "x\n"
    assert "0,1" in (run.out / "b" / "log").read_text().splitlines()
    assert results["b"]["gpus"] == [0, 1]
    (row,) = (line.split() for line in printed.splitlines() if line.startswith("b  "))
    assert row[1] == "0,1"
    assert "passed" in row[2:4]


def test_a_command_that_fails_ends_its_task_alone(run, tiny):
    tasks = [tiny("a", "echo why; exit 3", "touch {out}/not"), tiny("b")]
    code, results, _ = run(tasks)
    assert (code, statuses(results)) == (1, {"a": "failed", "b": "passed"})
    assert results["a"]["last"] == "+ exit 3"
    assert not (run.out / "a" / "not").exists()


def test_a_task_comes_after_what_it_needs_or_not_at_all(run, tiny):
    tasks = [
        tiny("uses", "cat {folder}/made", after=("makes",), estimate_s=9),
        tiny("makes", "sleep 0.3; echo it > {folder}/made", makes=("made",)),
        tiny("waits", after=("fails",)),
        tiny("fails", "false"),
        tiny("waits longer", after=("waits",)),
    ]
    code, results, _ = run(tasks, gpus=4)
    assert code == 1
    assert (results["uses"]["status"], results["uses"]["last"]) == ("passed", "it")
    assert results["waits"]["reason"] == "needs fails, which has not passed"
    assert results["waits longer"]["status"] == "skipped"


def test_nothing_is_made_for_tasks_that_cannot_run(run, tiny):
    tasks = [tiny("makes", makes=("x",)), tiny("uses", after=("makes",), gpus=2), tiny("other")]
    code, results, _ = run(tasks)
    assert (code, results["uses"]["reason"]) == (0, "needs 2 GPUs")
    assert results["makes"]["reason"] == "nothing that can run needs it"


def test_a_task_over_its_limit_is_killed_with_all_it_started(run, tiny, tmp_path):
    pids = tmp_path / "pids"
    started = f"(sleep 60 & echo $! >> {pids}); setsid sleep 60 & echo $! >> {pids}; wait"
    code, results, _ = run([tiny("slow", started, limit_s=1), tiny("b")], gpus=2)
    assert (code, statuses(results)) == (1, {"slow": "timed out", "b": "passed"})
    assert len(pids.read_text().split()) == 2
    for pid in pids.read_text().split():
        assert is_gone(int(pid))


def test_what_a_task_leaves_behind_is_killed_with_it(run, tiny, tmp_path):
    pid = tmp_path / "pid"
    code, results, _ = run([tiny("crashes", f"setsid sleep 60 & echo $! > {pid}; exit 3")])
    assert (code, results["crashes"]["status"]) == (1, "failed")
    assert is_gone(int(pid.read_text()))


def is_gone(pid):
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_nothing_starts_that_cannot_end_in_time(run, tiny):
    tasks = [tiny("long", estimate_s=100), tiny("short"), tiny("wrong", "sleep 60", limit_s=100)]
    code, results, _ = run(tasks, "--minutes", 2 / 60, gpus=2)
    assert (code, results["short"]["status"]) == (1, "passed")
    assert results["long"]["status"] == "not started"
    assert results["long"]["reason"] == "needs about 100 s, but less time is left"
    assert results["wrong"]["status"] == "timed out"
    assert results["wrong"]["reason"] == "the time of the whole run was over"


def test_once_more_runs_only_what_has_not_passed(run, tiny, tmp_path):
    count, open_gate = tmp_path / "count", tmp_path / "gate"
    tasks = [
        tiny("a", f"echo a >> {count}"),
        tiny("b", f"echo b >> {count}; test -e {open_gate}"),
        tiny("c", after=("b",)),
    ]
    assert run(tasks)[0] == 1
    open_gate.touch()
    code, results, _ = run(tasks)
    assert (code, set(statuses(results).values())) == (0, {"passed"})
    assert sorted(count.read_text().split()) == ["a", "b", "b"]
    assert run(tasks)[0] == 0
    assert sorted(count.read_text().split()) == ["a", "b", "b"]


def test_files_that_are_lost_are_made_again_for_what_still_needs_them(run, tiny, tmp_path):
    gate, made = tmp_path / "gate", run.folder / "made"
    tasks = [
        tiny("makes", "touch {folder}/made", makes=("made",)),
        tiny("uses", "test -e {folder}/made", f"test -e {gate}", after=("makes",)),
    ]
    assert run(tasks)[0] == 1
    made.unlink()
    gate.touch()
    assert run(tasks)[0] == 0
    made.unlink()
    assert run(tasks)[0] == 0
    assert not made.exists()


def test_without_room_for_its_files_a_task_is_skipped(run, tiny):
    tasks = [tiny("huge", room_gb=10**9, makes=("x",)), tiny("uses", after=("huge",))]
    code, results, _ = run(tasks)
    assert code == 1  # nothing passed
    assert results["huge"]["reason"].startswith("needs 1000000000 GB in ")
    assert results["uses"]["reason"] == "needs huge, which has not passed"


def test_tests_that_were_all_skipped_have_not_passed(run, tiny):
    tasks = [tiny("a", "echo '3 skipped in 0.10s'"), tiny("b", "echo '1 passed, 3 skipped in 1s'")]
    code, results, _ = run(tasks)
    assert (code, statuses(results)) == (0, {"a": "skipped", "b": "passed"})
    assert results["a"]["reason"] == "pytest: 3 skipped in 0.10s; the log says why"


def test_only_those_named_run_with_what_they_need(run, tiny):
    tasks = [tiny("x-1", after=("y",)), tiny("x-2"), tiny("y"), tiny("z")]
    assert set(run(tasks, "--only", "x-*")[1]) == {"x-1", "x-2", "y"}


def test_some_run_only_if_they_are_named(run, tiny):
    tasks = [
        tiny("a"),
        tiny("b", by_name=True),
        tiny("c", "test $X = 1", environment=(("X", "1"),)),
    ]
    assert statuses(run(tasks)[1]) == {"a": "passed", "c": "passed"}
    assert statuses(run(tasks, "--only", "*")[1]) == dict.fromkeys("abc", "passed")


def test_a_name_of_no_task_is_an_error(run, tiny, capsys):
    with pytest.raises(SystemExit) as error:
        run([tiny("a")], "--only", "a,b-*")
    assert error.value.code == 2
    assert "no task is called b-*; see --list" in capsys.readouterr().err


def test_the_list_has_estimates_needs_and_what_is_missing(machine, tiny, capsys):
    tasks = [tiny("a"), tiny("b", gpus=2, estimate_s=30, after=("a",)), tiny("c", beside=3)]
    assert module.main(["--list"], tasks, machine(1)) == 0
    rows = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["a", "1", "1", "-", "runs"],
        ["b", "2", "30", "a", "needs 2 GPUs"],
        ["c", "1/3", "1", "-", "runs"],
    ]


def test_without_a_gpu_nothing_runs_and_the_exit_code_says_so(run, tiny):
    code, results, _ = run([tiny("a")], gpus=0)
    assert (code, results["a"]["reason"]) == (1, "needs a GPU")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_what_runs_and_loses_nothing(tmp_path, number):
    pid, script = tmp_path / "pid", tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.append({str(HERE)!r})\n"
        "import run; from machine import Gpu, Machine; from task import Task\n"
        "tasks = [Task(name='quick', commands=('true',), estimate_s=50),\n"
        f"    Task(name='slow', commands=('echo $$ > {pid}; sleep 60',), estimate_s=40),\n"
        "    Task(name='never', commands=('true',), estimate_s=30)]\n"
        f"words = ['--out', {str(tmp_path / 'out')!r}, '--folder', {str(tmp_path)!r}]\n"
        "machine = Machine((Gpu(0, 'H100', 85.0, '9.0'),), (0,))\n"
        "sys.exit(run.main(words, tasks, machine))\n"
    )
    # Whoever runs the tests may ignore it, as nohup does, and processes inherit that.
    heard = partial(signal.signal, number, signal.SIG_DFL)
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as running:
        try:
            while not (pid.exists() and pid.read_text().strip()):
                assert running.poll() is None
                time.sleep(0.05)
            os.kill(running.pid, number)
            printed, _ = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 1
    assert is_gone(int(pid.read_text()))
    results = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    assert statuses(results) == {"quick": "passed", "slow": "interrupted"}
    rows = [line.split(maxsplit=3) for line in printed.splitlines()[-5:-2]]
    assert [row[0] for row in rows] == ["quick", "slow", "never"]
    assert "interrupted" in rows[1]
    assert rows[2] == ["never", "not", "started"]


def test_a_signal_that_is_ignored_stays_so():
    class Stopped:
        def stop(self):
            raise AssertionError("it was heard")

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with module.stopped_by_signals(Stopped()):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
