from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import first_call
import pytest

from moequant.formats import get_format
from moequant.runtime.backends import backends


@pytest.fixture
def seconds(monkeypatch):
    """What processes print, in turns; the caches of each, and whether they were there before."""
    printed, seen = iter(()), []

    def run(command, *, env, **_):
        seen.append((command[-1], env["MOEQUANT_CACHE_DIR"]))
        return SimpleNamespace(stdout=f"{next(printed)}\n")

    def say(*values):
        nonlocal printed
        printed = iter(values)
        return seen

    monkeypatch.setattr(subprocess, "run", run)
    return say


def test_a_format_is_called_with_empty_and_then_with_filled_caches_of_its_own(seconds, tmp_path):
    seen = seconds(3.5, 0.5, 2.5, 0.25)
    out = tmp_path / "found.json"
    assert first_call.main(["--json", str(out), "--only", "mxfp4,w4a8"]) == 0
    assert json.loads(out.read_text()) == {
        "mxfp4": {"empty": 3.5, "filled": 0.5},
        "w4a8": {"empty": 2.5, "filled": 0.25},
    }
    assert [name for name, _ in seen] == ["mxfp4", "mxfp4", "w4a8", "w4a8"]
    caches = [cache for _, cache in seen]
    assert caches[0] == caches[1] != caches[2] == caches[3]


@pytest.mark.parametrize(
    ("found", "words"), [((21, 0.5), "empty caches takes 21.00 s"), ((3, 1.5), "1.50 s; at most 1")]
)
def test_a_call_that_takes_too_long_is_named(found, words, seconds, tmp_path, capsys):
    seconds(*found)
    assert first_call.main(["--json", str(tmp_path / "out"), "--only", "nvfp4"]) == 1
    assert words in capsys.readouterr().out


def test_cases_have_known_formats_and_backends():
    for format, _, backend in first_call.CASES.values():
        assert get_format(format)
        assert backend is None or backend in backends()


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        first_call.main(["--json", "out", "--only", "int3"])
    assert "no case is called int3" in capsys.readouterr().err
