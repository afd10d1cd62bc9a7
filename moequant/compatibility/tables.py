"""The tables beside this file: rules.toml, kernels.toml, gpus.toml, attention.toml and so on."""

from __future__ import annotations

import tomllib
from functools import cache
from pkgutil import get_data
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def read_table(name: str) -> Mapping[str, Any]:
    """A table by the name of its file."""
    data = get_data(__name__, name)
    assert data is not None
    return tomllib.loads(data.decode())


def fields_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a table as fields of a frozen dataclass.

    Lists become tuples; `capability`, and `from` and `to` as `from_capability` and `to_capability`,
    become (major, minor).
    """
    names = {"from": "from_capability", "to": "to_capability"}
    fields = {names.get(key, key): value for key, value in entry.items()}
    for key, value in fields.items():
        if key.endswith("capability"):
            fields[key] = _parse_capability(value)
        elif isinstance(value, list):
            fields[key] = tuple(value)
    return fields


def _parse_capability(text: str) -> tuple[int, int]:
    """(9, 0) of the text 9.0."""
    major, minor = text.split(".")
    return int(major), int(minor)
