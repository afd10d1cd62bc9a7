from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import first_start as module
import pytest


@pytest.fixture
def started(monkeypatch):
    """Options and caches of every start of a server that answers at once; none is there."""
    found = []

    @contextmanager
    def serve(checkpoint, log, *, alone, beside, options, start_s):
        log.write_text("why it fails\n")
        found.append((options, os.environ["VLLM_CACHE_ROOT"]))
        if "--fail" in options:
            raise RuntimeError("the server ended")
        yield "server"

    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(module, "complete", lambda server, request: [1])
    for name in module._CACHES:  # so that they are put back
        monkeypatch.setenv(name, "of the user")
    return found


def start(monkeypatch, tmp_path, *options):
    prepared = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: prepared.append(command[3:]))
    words = ["first_start.py", "q", "--json", str(tmp_path / "out.json"), "--", *options]
    monkeypatch.setattr(sys, "argv", words)
    module.main()
    return prepared


def test_three_starts_of_which_the_last_has_prepared_experts(started, monkeypatch, tmp_path):
    prepared = start(monkeypatch, tmp_path, "--dtype", "bfloat16")
    assert prepared == [["prepare", "q", "--target", "sm90", "--overwrite", "-q"]]
    options = [options for options, _ in started]
    assert options[:2] == [["--dtype", "bfloat16"]] * 2
    assert json.loads(options[2][-1]) == {"moequant": {"prepared": "sm90"}}
    document = json.loads((tmp_path / "out.json").read_text())
    assert list(document) == ["first", "second", "prepared"]
    for times in document.values():
        assert set(times) == {
            "ready_s", "first_answer_s", "cached_answer_s", "another_length_answer_s"
        }  # fmt: skip


def test_starts_share_caches_that_nothing_else_has(started, monkeypatch, tmp_path):
    start(monkeypatch, tmp_path)
    (cache,) = {cache for _, cache in started}
    assert cache != "of the user"
    assert not os.path.lexists(cache)


def test_the_log_of_a_start_that_fails_is_printed(started, monkeypatch, tmp_path, capsys):
    with pytest.raises(RuntimeError, match="the server ended"):
        start(monkeypatch, tmp_path, "--fail")
    assert "why it fails" in capsys.readouterr().out
