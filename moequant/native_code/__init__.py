"""Functions for this processor, written as LLVM IR and compiled when they are needed."""

from __future__ import annotations


class UnavailableError(Exception):
    """This machine does not run such functions; always caught: a reference does their work.

    The message becomes a warning.
    """
