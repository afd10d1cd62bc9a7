"""Signals that come while torch is imported."""

from __future__ import annotations

import signal
import sys

import click
import pytest

from moequant.cli.torch_import import with_torch


@pytest.fixture
def torch_that_loses_interrupts(tmp_path, monkeypatch):
    """Its import meets SIGINT, and takes what that raises for something else."""
    (tmp_path / "torch.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("torch_that_loses_interrupts")
def test_an_interrupt_takes_effect_when_torch_is_imported():
    ran = []
    group = click.Group(commands={"work": click.Command("work", callback=lambda: ran.append(1))})
    with_torch(group)
    with pytest.raises(KeyboardInterrupt):
        group.commands["work"].callback()
    assert not ran
    assert sys.modules["torch"].whole
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
