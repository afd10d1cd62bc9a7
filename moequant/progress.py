"""How long work reports what it has done; the command line supplies bars, the library none."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives progress of one long task. Methods may be called from several threads."""

    def start(self, description: str, total: int, *, unit: str = "bytes") -> None:
        """A task begins that will move `total` bytes, or do as many of `unit`."""

    def advance(self, done: int, current: str) -> None:
        """`done` more are done; `current` names what was just worked on."""

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
