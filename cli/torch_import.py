"""Importing torch before a command runs."""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable


def with_torch(command: click.Command) -> click.Command:
    """The command, or those of a group, which then import torch when they run.

    Ctrl-C and SIGTERM take effect after the import: one that arrives while torch imports NumPy
    would be lost, since torch takes any failure there for a missing NumPy.
    """
    if isinstance(command, click.Group):
        for one in command.commands.values():
            with_torch(one)
    elif command.callback is not None:
        command.callback = _after_torch(command.callback)
    return command


def _after_torch(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def run(*args: Any, **settings: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            import torch  # noqa: F401 - for what the command imports
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return callback(*args, **settings)

    return run
