"""Read fields of an untrusted config.json."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as show
from typing import Any

from moequant.errors import CheckpointError

QUANTIZATION_CONFIG = "quantization_config"
_MAX_KEY_LENGTH = 250


def key_text(key: str) -> str:
    """A key for error messages, abbreviated if it is longer than any real one."""
    return key if len(key) <= _MAX_KEY_LENGTH else show(key)


def mapping_field(fields: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The object at `key`, empty if it is missing or null.

    Raises:
        CheckpointError: it has another type.
    """
    value = fields.get(key)
    return {} if value is None else as_mapping(value, f"{where}.{key}")


def names_field(fields: Mapping[str, Any], key: str, where: str) -> list[str]:
    """The list of strings at `key`, empty if it is missing or null.

    Raises:
        CheckpointError: it has another type.
    """
    value = fields.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(
            f"{where}.{key} is {show(value)}, not a list of names; correct config.json"
        )
    return value


def as_mapping(value: object, where: str) -> Mapping[str, Any]:
    """`value` as an object with string keys.

    Raises:
        CheckpointError: it has another type.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{where} is {show(value)}, not an object; correct config.json")
    return value
