"""The interface for progress reports; the command line implements it with progress bars."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one long task. Methods may be called from several threads."""

    def start(self, description: str, total: int, *, unit: str = "bytes") -> None:
        """A task of `total` units begins; the unit is bytes unless `unit` says otherwise."""

    def advance(self, done: int, current: str) -> None:
        """`done` more units are done; `current` says where, such as "layer 3/48".

        `done` is negative where work has to be done again.
        """

    def finish(self) -> None:
        """The task ended."""


class SilentProgress:
    """Reports nothing."""

    def start(self, description: str, total: int, *, unit: str = "bytes") -> None:
        """Ignore."""

    def advance(self, done: int, current: str) -> None:
        """Ignore."""

    def finish(self) -> None:
        """Ignore."""
