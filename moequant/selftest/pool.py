"""Run a function for each of several arguments, in processes of their own."""

from __future__ import annotations

import faulthandler
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from moequant.cores import available_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, kw_only=True)
class Died:
    """In place of a result: the process ended before it, as where a kernel brings it down.

    Attributes:
        in_time: whether it ended by itself; False where it was ended at the limit.
    """

    in_time: bool


def run_apart(
    function: Callable[[Any], Any], arguments: Sequence[Any], processes: int, *, limit_s: float
) -> Iterator[tuple[int, Any]]:
    """`function(argument)` for each, as results come: the argument's position, and the result.

    Where a process dies, `Died` is the result of the argument that it had; the others get one.

    Args:
        function: pickled by its name, as are arguments and results.
        arguments: what it gets.
        processes: at most this many at once, at least 1, each with its share of the cores. Each
            imports the caller's main module anew, so a script starts its work under
            `if __name__ == "__main__"`.
        limit_s: the most seconds for an argument, as a kernel may wait for ever: the process then
            prints where it is on its standard error, and ends.
    """
    within = partial(_within, function, limit_s)
    missing = dict(enumerate(arguments))
    processes = min(processes, len(missing) or 1)
    cores = max(1, available_cores() // processes)
    with _pool(processes, cores) as pool:
        try:
            positions = {pool.submit(within, argument): i for i, argument in missing.items()}
            for future in as_completed(positions):
                # When a process dies, others may have ended their work at the same time.
                if not isinstance(future.exception(), BrokenProcessPool):
                    del missing[positions[future]]
                    yield positions[future], future.result()
        except BrokenProcessPool:  # while arguments were handed over
            pass
        finally:
            # Where this is interrupted, nobody waits for the results.
            pool.shutdown(cancel_futures=True)
    # The pool does not say which argument it was, and all behind it are without a result.
    with ThreadPoolExecutor(processes) as threads:
        alone = {
            threads.submit(_run_alone, within, argument, cores, limit_s): i
            for i, argument in missing.items()
        }
        try:
            for done in as_completed(alone):
                yield alone[done], done.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _run_alone(function: Callable[[Any], Any], argument: Any, cores: int, limit_s: float) -> Any:
    """What a process for this argument alone returns; `Died` where it ends before that."""
    started = time.monotonic()
    with _pool(1, cores) as pool:
        try:
            return pool.submit(function, argument).result()
        except BrokenProcessPool:
            return Died(in_time=time.monotonic() - started < limit_s)


def _within(function: Callable[[Any], Any], limit_s: float, argument: Any) -> Any:
    """`function(argument)`; ends this process where that takes longer than the limit."""
    # By a thread that needs no lock of Python's, which a call that hangs may hold.
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        return function(argument)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _pool(processes: int, cores: int) -> ProcessPoolExecutor:
    """Processes that compute on `cores` cores each."""
    # A forked process could not use CUDA.
    return ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(cores,)
    )
