from __future__ import annotations

import os
import subprocess

from process import Process


def test_processes_that_cannot_be_ended_are_named(tmp_path, monkeypatch):
    process = Process(
        "setsid sleep 100 & wait",
        folder=tmp_path,
        environment=dict(os.environ),
        cores=os.sched_getaffinity(0),
        log=subprocess.DEVNULL,
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: None)
        left = process.end(within_s=0.5)
    assert left
    assert process.returncode() is None
    assert process.end() == []
    assert process.returncode() is not None
