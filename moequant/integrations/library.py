"""transformers, imported late: an extra."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
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


@cache
def _check_version(version: str) -> None:
    # Releases begin with two numbers, also those for development, such as 5.24.0.dev0.
    if tuple(int(number) for number in version.split(".")[:2]) < _OLDEST:
        raise UnsupportedError(
            f"transformers {version} is installed, but moequant needs "
            f"{'.'.join(map(str, _OLDEST))} or newer; install it: "
            "pip install 'moequant[transformers]'"
        )
