"""transformers, imported late: an extra."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


_OLDEST = (5, 17)
"""Tests of this package pass with 5.17.0 on a CPU, as with the release that the extra asks for."""


def import_transformers() -> ModuleType:
    """The transformers library.

    Raises:
        UnsupportedError: it is not installed, or older than this package can use.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers cannot be imported ({error}); install it: "
            "pip install 'moequant[transformers]'"
        ) from error
    library: ModuleType = transformers
    _check_version(library.__version__)
    return library


@contextmanager
def building(name: str) -> Iterator[None]:
    """Within it, a model of the class `name` is made from config.json.

    Raises:
        CheckpointError: for what transformers raises, as an operation of Python's or torch's that
            fails: a value of config.json is of a wrong type, or does not go with others.
        UnsupportedError: a package is not installed that attention is asked to run by.
    """
    try:
        yield
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedError(
            f"{name}: {reason}; choose attn_implementation 'sdpa' or 'eager', as an argument or in "
            "config.json, or install what it needs"
        ) from error
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{name}: transformers {import_transformers().__version__} cannot make the model that "
            f"config.json describes: {type(error).__name__}: {error}; compare config.json with "
            "that of the model's release"
        ) from error


@cache
def _check_version(version: str) -> None:
    # Releases begin with two numbers, also those for development, such as 5.24.0.dev0.
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST:
        raise UnsupportedError(
            f"transformers {version} is installed, but moequant needs "
            f"{'.'.join(map(str, _OLDEST))} or newer; install it: "
            "pip install 'moequant[transformers]'"
        )
