"""A recipe as the TOML file that `load_recipe` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moequant.conversion import Recipe


def recipe_toml(recipe: Recipe) -> str:
    """The text of a file with this recipe; fields with their default are left out."""
    return "\n".join(_lines(recipe)) + "\n"


def _lines(recipe: Recipe) -> Iterator[str]:
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    rules, output = fields.pop("rules"), fields.pop("output", {})
    yield from _pairs({"schema_version": recipe.schema_version, **fields})
    for rule in rules:
        yield from ("", "[[rules]]", *_pairs(rule))
    if output:
        yield from ("", "[output]", *_pairs(output))


def _pairs(fields: Mapping[str, object]) -> Iterator[str]:
    for key, value in fields.items():
        yield f"{key} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_value(key)} = {_value(own)}" for key, own in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # TOML's strings are those of JSON, but for surrogate pairs and a raw DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
