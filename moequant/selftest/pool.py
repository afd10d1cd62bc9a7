"""Run a function for each of several arguments, in processes of their own."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

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
        processes: at most this many at once, at least 1, each with its share of the cores.
    """
    missing = dict(enumerate(arguments))
    with _pool(min(processes, len(missing) or 1)) as pool:
        positions = {pool.submit(function, argument): i for i, argument in missing.items()}
        try:
            for future in as_completed(positions):
                result = future.result()
                del missing[positions[future]]
                yield positions[future], result
        except BrokenProcessPool:
            pass
    # The pool does not say which argument it was, and all behind it are without a result.
    for position, argument in missing.items():
        with _pool(1) as pool:
            try:
                yield position, pool.submit(function, argument).result()
            except BrokenProcessPool:
                yield position, Died()


def _pool(processes: int) -> ProcessPoolExecutor:
    cores = max(1, (os.cpu_count() or 1) // processes)
    # A forked process could not use CUDA.
    return ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(cores,)
    )
