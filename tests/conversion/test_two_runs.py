"""Two runs on one output at once: one works, the other is refused or finds the work done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moequant.conversion.journal import Journal


@pytest.fixture(scope="module")
def command(small_source):
    def command(out):
        words = [sys.executable, "-m", "moequant", "convert", small_source, out]
        return [*map(str, words), "--format", "nvfp4", "--max-shard-size", "300KB"]

    return command


def test_a_run_is_refused_while_another_holds_the_output(command, tmp_path, contents):
    out = tmp_path / "out"
    with Journal(out).lock():
        before = contents(out)
        done = subprocess.run(command(out), capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "another conversion is running here; wait for it, or stop it" in done.stderr
        assert contents(out) == before


def test_two_runs_at_once(command, small_source, tmp_path, contents, struck):
    struck(small_source, tmp_path / "whole", format="nvfp4", max_shard_size="300KB")
    out = tmp_path / "out"
    pipe = subprocess.PIPE
    runs = [subprocess.Popen(command(out), stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    ends = [(run.communicate(timeout=120), run.returncode) for run in runs]
    for (stdout, stderr), code in ends:
        assert code == 0 or "another conversion is running here" in stderr, (stdout, stderr)
    assert sum("already converted" not in stdout for (stdout, _), code in ends if code == 0) == 1
    assert contents(out) == contents(tmp_path / "whole")
