"""Paths that a caller gives, checked before Python would fail with an error of its own."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from reprlib import repr as show

from moequant.errors import CheckpointError, MoequantError, UnsupportedError


def given_path(
    argument: str,
    value: object,
    *,
    what: str = "a checkpoint's folder",
    error: type[MoequantError] = CheckpointError,
) -> Path:
    """The path that a caller gives, whether or not anything is there; "~" is a home folder.

    Args:
        argument: its name, for messages.
        value: what is given.
        what: what the path is of, for messages.
        error: what is raised where nothing can have that path.

    Raises:
        CheckpointError: nothing can have that path, or it is empty; or as `error` says.
        UnsupportedError: it is neither a text nor a path.
    """
    wanted = f"the path of {what}"
    given = path_text(argument, value, wanted)
    found = f"{argument} is {show(given)}, but must be {wanted}"
    if not given:  # pathlib takes an empty path as the current folder
        raise error(f"{found}; give one that is not empty: the current folder is '.'")
    # Not Path.expanduser, which fails for an unknown user without naming the path.
    path = Path(os.path.expanduser(given))  # noqa: PTH111
    try:
        path.stat()
    except OSError as why:
        if why.errno == errno.ENAMETOOLONG:
            raise error(f"{found}: {why.strerror}; give a shorter path") from why
    except ValueError as why:  # a NUL, or half of a surrogate pair
        raise error(f"{found}: {why}; remove that character") from why
    return path


def path_text(argument: str, value: object, wanted: str) -> str:
    """The text of a path that a caller gives.

    Args:
        argument: its name, for messages.
        value: what is given.
        wanted: what it must be, in words.

    Raises:
        UnsupportedError: it is neither a text nor a path.
    """
    # os.fspath, because not every os.PathLike is a text.
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise UnsupportedError(
            f"{argument} is {show(value)}, but must be {wanted}, as a str or Path"
        )
    return given
