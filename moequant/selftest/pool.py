"""Run a function for each of several arguments, in processes of their own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from moequant.cores import available_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Died:
    """In place of a result: the process ended before it, as where a kernel brings it down."""


def run_apart(
    function: Callable[[Any], Any], arguments: Sequence[Any], processes: int
) -> Iterator[tuple[int, Any]]:
    """`function(argument)` for each, as results come: the argument's position, and the result.

    Where a process dies, `Died` is the result of the argument that it had; the others get one.

    Args:
        function: pickled by its name, as are arguments and results.
        arguments: what it gets.
        processes: at most this many at once, at least 1, each with its share of the cores. Each
            imports the caller's main module anew, so a script starts its work under
            `if __name__ == "__main__"`.
    """
    missing = dict(enumerate(arguments))
    processes = min(processes, len(missing) or 1)
    cores = max(1, available_cores() // processes)
    with _pool(processes, cores) as pool:
        try:
            positions = {pool.submit(function, argument): i for i, argument in missing.items()}
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
            threads.submit(_run_alone, function, argument, cores): i
            for i, argument in missing.items()
        }
        try:
            for done in as_completed(alone):
                yield alone[done], done.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _run_alone(function: Callable[[Any], Any], argument: Any, cores: int) -> Any:
    """What a process for this argument alone returns; `Died` where it ends before that."""
    with _pool(1, cores) as pool:
        try:
            return pool.submit(function, argument).result()
        except BrokenProcessPool:
            return Died()


def _pool(processes: int, cores: int) -> ProcessPoolExecutor:
    """Processes that compute on `cores` cores each."""
    # A forked process could not use CUDA.
    return ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(cores,)
    )
