from __future__ import annotations

import signal
import subprocess
import sys
import warnings

import pytest

from moequant import __version__, conversion
from moequant.cli import cli, main


@pytest.fixture
def restored_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_module_and_script_say_the_version():
    script = [sys.executable, "-c", "from moequant.cli import main; main()", "--version"]
    for command in ([sys.executable, "-m", "moequant", "--version"], script):
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        assert done.stdout == f"moequant, version {__version__}\n"


@pytest.mark.usefixtures("restored_signals")
def test_termination_ends_a_command_as_an_interrupt_does(monkeypatch, capsys):
    def terminated(*args, **settings):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(conversion, "convert", terminated)
    monkeypatch.setattr(sys, "argv", ["moequant", "convert", "A B", "C", "--format", "w4a8"])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 130
    assert capsys.readouterr().err.endswith("moequant convert 'A B' C --format w4a8\n")


@pytest.mark.parametrize("command", [None, *cli.commands])
def test_every_command_has_help(run, command):
    result = run(*([command] if command else []), "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


def test_commands_are_these():
    assert list(cli.commands) == [
        "convert", "calibrate", "evaluate", "inspect", "check", "prepare", "verify", "report",
        "formats", "recipes", "generate", "warm-up", "selftest", "tune", "bench", "demo",
    ]  # fmt: skip
