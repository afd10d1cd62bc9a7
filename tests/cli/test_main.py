from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest

from moequant import __version__, conversion
from moequant.cli import cli, main
from moequant.conversion import shipped_recipes
from moequant.errors import MoequantError, SlowPathWarning


@pytest.fixture
def restored_signals():
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGALRM
    before, thresholds = [signal.getsignal(number) for number in numbers], gc.get_threshold()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    gc.set_threshold(*thresholds)


def test_module_and_script_say_the_version():
    script = [sys.executable, "-c", "from moequant.__main__ import main; main()", "--version"]
    for command in ([sys.executable, "-m", "moequant", "--version"], script):
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        assert done.stdout == f"moequant, version {__version__}\n"


def test_an_interruption_of_the_first_imports_is_no_traceback():
    program = """
import signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from moequant.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: interrupted\n")


@pytest.mark.usefixtures("restored_signals")
def test_no_interruption_waits_when_python_exits(monkeypatch):
    """Python takes its handlers away as it exits, and SIGALRM then kills it."""

    class Command:
        def main(self, prog_name):
            signal.setitimer(signal.ITIMER_REAL, 60)

    monkeypatch.setattr("moequant.cli.cli", Command())
    with warnings.catch_warnings():
        main()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN  # of one that comes later


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


@pytest.mark.usefixtures("restored_signals")
def test_a_warning_of_ours_looks_like_those_of_commands(monkeypatch, capsys):
    def slow(*args, **settings):
        warnings.warn("this is slow", SlowPathWarning, stacklevel=1)
        warnings.warn("as Python has it", RuntimeWarning, stacklevel=1)
        raise MoequantError("enough")

    monkeypatch.setattr(conversion, "convert", slow)
    monkeypatch.setattr(sys, "argv", ["moequant", "convert", "A", "B", "--format", "w4a8"])
    with pytest.warns(RuntimeWarning, match="as Python has it"), pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("Warning: this is slow\n")


@pytest.mark.parametrize("command", [None, *cli.commands])
def test_every_command_has_help(run, command):
    result = run(*([command] if command else []), "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


def commands(group=cli, name="moequant"):
    """Every command that does something, by the words that call it."""
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


@pytest.mark.parametrize(("called", "command"), list(commands()))
def test_help_ends_with_examples_whose_options_and_names_there_are(called, command):
    title, *examples = command.epilog.removeprefix("\b\n").splitlines()
    assert title == "Examples:"
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        assert " ".join(words).startswith("moequant ")
        group, *rest = words[1:]
        found = cli.commands[group]
        if isinstance(found, click.Group):
            found, rest = found.commands[rest[0]], rest[1:]
        # As `found.main` does before it calls the command: it refuses unknown options and names.
        context = found.make_context(called, rest)
        if recipe := context.params.get("recipe"):
            assert recipe in (*shipped_recipes(), "mine.toml")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_switched_on_as_the_page_says(shell):
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    assert f"_MOEQUANT_COMPLETE={shell}_source moequant" in page
    environment = {**os.environ, "_MOEQUANT_COMPLETE": f"{shell}_source"}
    script = [sys.executable, "-c", "import sys; sys.argv[0] = 'moequant'; "
              "from moequant.__main__ import main; main()"]  # fmt: skip
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    # click asks bash for its version first; where there is none of the shell, it still answers.
    assert "_MOEQUANT_COMPLETE" in done.stdout


def test_the_line_that_switches_completion_on_is_one_line_of_help(run):
    lines = run("--help").stdout.splitlines()  # click folds at 80 columns
    assert '    eval "$(_MOEQUANT_COMPLETE=bash_source moequant)"' in lines


def test_commands_are_these():
    assert list(cli.commands) == [
        "convert", "calibrate", "evaluate", "inspect", "check", "prepare", "verify", "report",
        "push", "formats", "recipes", "generate", "warm-up", "selftest", "tune", "bench", "demo",
    ]  # fmt: skip
