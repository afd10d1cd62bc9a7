"""TOML files that users write."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


_CORRECT = "correct it, or give another file"


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read; the message is the reason.
    """
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror) from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except ValueError as error:  # the path has a NUL, or half of a surrogate pair
        raise ValueError(f"no path of a file: {error}; remove that character") from None


def parse_toml(text: str) -> dict[str, Any]:
    """What a text says; raises ValueError with the reason if it is not TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(
            f"not TOML: it has too many brackets within each other; {_CORRECT}"
        ) from None
    except ValueError as error:  # not only TOMLDecodeError: a number may have too many digits
        raise ValueError(f"not TOML: {error}; {_CORRECT}") from None
