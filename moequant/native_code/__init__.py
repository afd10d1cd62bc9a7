"""Functions for this processor, written as LLVM IR and compiled when they are needed."""

from __future__ import annotations


class UnavailableError(Exception):
    """No such function can be used; always caught: a reference does its work.

    The message becomes a warning.
    """
