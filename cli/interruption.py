"""Ctrl-C and SIGTERM, which end a command by KeyboardInterrupt.

Python drops an exception that is raised in some callbacks of an import, and torch takes any failure
while it imports NumPy for a missing NumPy. So an interruption waits until the import has ended.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_IMPORTING = "<frozen importlib"
"""What the names of Python's own files of imports begin with."""
_AGAIN_S = 0.02
_LONGEST_S = 10.0
"""For which an interruption waits: a module may call `main` while it is imported itself."""


def raise_interruptions() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, and at SIGTERM, which `kill` and a time limit send."""
    handler = _Interruptions()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.signal(signal.SIGALRM, handler)


def end_waiting() -> None:
    """Drop an interruption that waits, at the end, and the timer of one that comes later.

    It would kill Python as it exits, which takes handlers away.
    """
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


class _Interruptions:
    """A handler of signals that waits for imports."""

    def __init__(self) -> None:
        self._since: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if _is_importing(frame) and now - self._since < _LONGEST_S:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        self._since = None
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False
