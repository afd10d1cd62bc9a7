"""How commands fail: one message on stderr and one exit code for every kind of error."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """How an error is reported."""

    kind: str
    message: str
    exit_code: int
    expected: bool = True


def _report(error: BaseException, arguments: list[str], options: set[str]) -> int:
    """Print the error and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return _close_stdout()
    result: Mapping[str, Any] = {}
    if isinstance(error, FailedResult):
        result = error.result
        error = error.error
    failure = _describe(error, arguments, options)
    if not failure.expected or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, InterruptedWork):
        click.echo(err=True)  # closes the line on which the terminal put ^C
    if isinstance(error, click.UsageError):
        error.show()
    else:
        click.echo(printable(f"Error: {failure.message}"), err=True)
    # Searched in the arguments because parsing them may have failed.
    if "--json" in arguments:
        fields = {
            "type": failure.kind,
            "message": failure.message,
            "exit_code": failure.exit_code,
        }
        with suppress(OSError):  # writing to stdout may have failed
            print_document({**result, "error": fields})
    return failure.exit_code


def _describe(error: BaseException, arguments: list[str], options: set[str]) -> _Failure:
    kind = type(error).__name__
    match error:
        case InterruptedWork():
            again = shlex.join(["moequant", *arguments])
            message = f"interrupted; finished work is kept. To continue: {again}"
            return _Failure(kind="Interrupted", message=message, exit_code=INTERRUPTED)
        case KeyboardInterrupt() | click.Abort():
            return _Failure(kind="Interrupted", message="interrupted", exit_code=INTERRUPTED)
        case MoequantError():
            return _Failure(kind=kind, message=str(error), exit_code=error.exit_code)
        case click.ClickException():
            return _Failure(kind=kind, message=error.format_message(), exit_code=error.exit_code)
        case OSError():
            return _Failure(kind=kind, message=_explain(error), exit_code=1)
        case MemoryError() | RuntimeError() if _is_out_of_memory(error):
            what = f"out of memory: {error}" if str(error) else "out of memory"
            message = f"{what}; {_advice_on_memory(options)}"
            return _Failure(kind=kind, message=message, exit_code=1)
    message = f"{kind}: {error}; this is a bug in moequant, please report it with the traceback"
    return _Failure(kind=kind, message=message, exit_code=1, expected=False)


def _is_out_of_memory(error: BaseException) -> bool:
    """Python raises MemoryError; threads and torch's allocators only say it in the message."""
    words = ("can't start new thread", "can't allocate memory", "bad_alloc", "CUDA out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _advice_on_memory(options: set[str]) -> str:
    """How to run a command with these options in less memory."""
    less = [f"use a smaller {flag}" for flag in _TAKE_MEMORY if flag in options]
    return ", ".join([*less, "or free memory"] if less else ["free memory and run again"])


def _explain(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _close_stdout() -> int:
    """End silently when the reader of stdout is gone; the flush at exit must not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
