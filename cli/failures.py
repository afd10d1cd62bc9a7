"""How commands fail: one message on stderr and one exit code for every kind of error."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from moequant.cli.output import print_document, printable
from moequant.errors import MoequantError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEBUG_VARIABLE = "MOEQUANT_DEBUG"
INTERRUPTED = 130

_TAKE_MEMORY = ("--workers", "--tokens", "--max-tokens")
"""Options whose smaller values use less memory."""


class InterruptedWork(Exception):  # noqa: N818 - not an error
    """Ctrl-C or SIGTERM interrupted work that the same command can continue."""


class FailedResult(Exception):  # noqa: N818 - carries an error rather than being one
    """An error of a command that still has a result to print."""

    def __init__(self, error: MoequantError, result: Mapping[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error
        self.result = result


class CommandGroup(click.Group):
    """A group whose commands report errors as this module defines, in `main()` and in tests."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit; see `click.Command.main`."""
        arguments = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(arguments, prog_name, complete_var, standalone_mode=False, **extra)
        except (Exception, KeyboardInterrupt) as error:
            if not standalone_mode:
                raise
            code = _report(error, arguments, self._options(arguments))
        if standalone_mode:
            sys.exit(code)
        return code

    def _options(self, arguments: Sequence[str]) -> set[str]:
        """The options of the command that was run."""
        command: click.Command = self
        for word in arguments:
            if isinstance(command, click.Group):
                command = command.commands.get(word, command)
        return {flag for parameter in command.params for flag in parameter.opts}


def _report(error: BaseException, arguments: list[str], options: set[str]) -> int:
    """Print the error and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return _close_stdout()
    result: Mapping[str, Any] = {}
    if isinstance(error, FailedResult):
        result = error.result
        error = error.error
    expected, message, exit_code = _describe(error, arguments, options)
    if not expected or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, InterruptedWork):
        click.echo(err=True)  # closes the line on which the terminal put ^C
    if isinstance(error, click.UsageError):
        error.show()
    else:
        click.echo(printable(f"Error: {message}"), err=True)
    # Searched in the arguments because parsing them may have failed.
    if "--json" in arguments:
        kind = "Interrupted" if exit_code == INTERRUPTED else type(error).__name__
        fields = {"type": kind, "message": message, "exit_code": exit_code}
        with suppress(OSError):  # writing to stdout may have failed
            print_document({**result, "error": fields})
    return exit_code


def _describe(
    error: BaseException, arguments: list[str], options: set[str]
) -> tuple[bool, str, int]:
    """Whether the error is expected rather than a bug, its message, and the exit code."""
    match error:
        case InterruptedWork():
            again = shlex.join(["moequant", *arguments])
            message = f"interrupted; finished work is kept. To continue: {again}"
            return True, message, INTERRUPTED
        case KeyboardInterrupt() | click.Abort():
            return True, "interrupted", INTERRUPTED
        case MoequantError():
            return True, str(error), error.exit_code
        case click.ClickException():
            return True, error.format_message(), error.exit_code
        case OSError():
            reason = error.strerror or str(error)
            return True, reason if error.filename is None else f"{error.filename}: {reason}", 1
        case MemoryError() | RuntimeError() if _is_out_of_memory(error):
            what = f"out of memory: {error}" if str(error) else "out of memory"
            less = [f"use a smaller {flag}" for flag in _TAKE_MEMORY if flag in options]
            advice = [*less, "or free memory"] if less else ["free memory and run again"]
            return True, f"{what}; {', '.join(advice)}", 1
    message = f"{type(error).__name__}: {error}; this is a bug in moequant, please report it with"
    return False, f"{message} the traceback", 1


def _is_out_of_memory(error: BaseException) -> bool:
    """Python raises MemoryError; threads and torch's allocators only say it in the message."""
    words = ("can't start new thread", "can't allocate memory", "bad_alloc", "CUDA out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _close_stdout() -> int:
    """End silently when the reader of stdout is gone; the flush at exit must not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
