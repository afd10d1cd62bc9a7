"""Ctrl-C and SIGTERM that come while something is imported."""

from __future__ import annotations

import importlib
import signal
import sys
import time

import pytest

from moequant.cli import interruption
from moequant.cli.interruption import raise_interruptions

NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGALRM
LOSING = """
import signal, time
try:
    signal.raise_signal({number})
    time.sleep(0.1)
except KeyboardInterrupt:
    pass  # as torch does, while it imports NumPy
whole = True
"""


@pytest.fixture(autouse=True)
def _handlers():
    before = [signal.signal(number, signal.SIG_DFL) for number in NUMBERS]
    raise_interruptions()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(number): a module whose import meets a signal, and takes what that raises."""

    def make(number):
        (tmp_path / "losing_interrupts.py").write_text(LOSING.format(number=int(number)))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "losing_interrupts", raising=False)
        importlib.invalidate_caches()
        return "losing_interrupts"

    return make


def import_and_wait(name):
    importlib.import_module(name)
    time.sleep(5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_raised_at_once(number):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_an_import_is_raised_when_it_has_ended(module, number):
    name = module(number)
    with pytest.raises(KeyboardInterrupt):
        import_and_wait(name)
    assert sys.modules[name].whole


def test_an_import_that_does_not_end_is_interrupted(module, monkeypatch):
    monkeypatch.setattr(interruption, "_LONGEST_S", 0.05)
    name = module(signal.SIGINT)
    importlib.import_module(name)  # which takes the exception
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert sys.modules[name].whole


def test_what_was_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_interruptions()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
