"""Writes that a disk does while the thread that began them goes on: Linux's, by system call.

Decision / failure it prevents:

* no threads that wait for the disk / each write wakes one, and it and the workers take Python's
  lock from one another: more processor time than all else a write needs;
* Linux's own call, not io_uring / containers refuse that;
* numbers of system calls / the library that has names for them is on few machines;
* a context is used again, never destroyed / the system takes 30 ms for that.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_X86 = (206, 208, 209)
_OTHERS = (0, 4, 2)
_NUMBERS = {"x86_64": _X86, "aarch64": _OTHERS, "riscv64": _OTHERS}
"""Of io_setup, io_getevents and io_submit."""
_AT_ONCE = 64
_PWRITE = 1
NOT_NOW = (errno.EAGAIN, errno.EINTR)
"""What the system answers to a write that it would take at another time."""


class _Request(ctypes.Structure):
    """`struct iocb`."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key_and_flags", ctypes.c_uint64),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
        ("position", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("more_flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """`struct io_event`."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("more", ctypes.c_int64),
    )


_EVENTS = _Event * _AT_ONCE
"""Kept, because ctypes forgets types of arrays."""


class _Time(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_PATIENCE = _Time(0, 10_000_000)
"""A request that the system refused is counted for a moment, and never done."""


class _Calls(NamedTuple):
    """Each raises OSError."""

    setup: Callable[..., int]
    wait: Callable[..., int]
    look: Callable[..., int]
    """As `wait`, but keeps Python's lock: it does not wait, and to get the lock again may."""
    submit: Callable[..., int]


class _Write(NamedTuple):
    """One that is under way: its memory, which must stay, and what to call once it is done."""

    view: memoryview
    done: Callable[[int], None]


class WritesUnderWay:
    """Writes to one file, in memory that must stay as it is until each is done.

    Safe to use from several threads. Such a write does not wait where the file is open for direct
    input and output and has its space; elsewhere the system may do it at once.

    Args:
        fd: of the file, open for writing; it is closed by `close`.

    Raises:
        OSError: the system has no such thing, or too much of it is in use.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._under_way: dict[int, _Write] = {}
        self._numbers = itertools.count()
        self._collecting = threading.Lock()
        self._calls = _calls()
        self._context = _context()

    def begin(self, position: int, view: memoryview, done: Callable[[int], None]) -> None:
        """Begin to write `view` at `position`.

        Args:
            position: in the file.
            view: what to write.
            done: called by `collect`, or at once where it cannot be begun, with the number of bytes
                that are written or, below zero, that of the error.
        """
        number = next(self._numbers)
        request = _Request(
            data=number,
            opcode=_PWRITE,
            fd=self.fd,
            address=address_of(view),
            size_bytes=view.nbytes,
            position=position,
        )
        while True:
            self._under_way[number] = _Write(view, done)
            try:
                self._submit(request)
            except OSError as error:
                # Before any wait: what was not begun is never over.
                del self._under_way[number]
                if error.errno not in NOT_NOW or not self.collect(wait=True):
                    done(-(error.errno or errno.EIO))
                    return
            else:
                return

    def collect(self, *, wait: bool) -> bool:
        """Call `done` of the writes that are over; with `wait`, once there is one.

        Returns:
            Whether any was under way.
        """
        if not self._under_way:
            return False
        if self._collecting.acquire(blocking=wait):
            try:
                while self._under_way and not self._collect_some(wait=wait) and wait:
                    pass
            finally:
                self._collecting.release()
        return True

    def close(self) -> None:
        """Wait for all, and close the file."""
        while self.collect(wait=True):
            pass
        _free.append(self._context)
        os.close(self.fd)

    def _submit(self, request: _Request) -> None:
        self._calls.submit(self._context, 1, ctypes.byref(ctypes.pointer(request)))

    def _collect_some(self, *, wait: bool) -> int:
        events = _EVENTS()
        try:
            if wait:
                count = self._calls.wait(
                    self._context, 1, _AT_ONCE, events, ctypes.byref(_PATIENCE)
                )
            else:
                count = self._calls.look(self._context, 0, _AT_ONCE, events, None)
        except InterruptedError:
            return 0
        over = [(self._under_way.pop(event.data), event.result) for event in events[:count]]
        for write, result in over:
            write.done(result)
        return count


def address_of(view: memoryview) -> int:
    """Where in memory the bytes of a writable view begin."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


_free: list[ctypes.c_ulong] = []
"""Contexts with nothing under way."""
# They are the parent's alone.
os.register_at_fork(after_in_child=_free.clear)


def _context() -> ctypes.c_ulong:
    try:
        return _free.pop()
    except IndexError:
        made = ctypes.c_ulong(0)
        _calls().setup(_AT_ONCE, ctypes.byref(made))
        return made


@cache
def _calls() -> _Calls:
    numbers = _NUMBERS.get(os.uname().machine) if sys.platform == "linux" else None
    if numbers is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    setup, getevents, submit = numbers
    waiting, holding = (kind(None, use_errno=True) for kind in (ctypes.CDLL, ctypes.PyDLL))
    context, pointer = ctypes.c_ulong, ctypes.c_void_p
    events = (context, ctypes.c_long, ctypes.c_long, pointer, pointer)
    return _Calls(
        setup=_call(waiting, setup, ctypes.c_uint, pointer),
        wait=_call(waiting, getevents, *events),
        look=_call(holding, getevents, *events),
        submit=_call(waiting, submit, context, ctypes.c_long, pointer),
    )


def _call(library: ctypes.CDLL, number: int, *types: Any) -> Callable[..., int]:
    """The system call of this number."""
    function = library["syscall"]
    function.argtypes = (ctypes.c_long, *types)
    function.restype = ctypes.c_long

    def call(*arguments: Any) -> int:
        result = int(function(number, *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    return call
