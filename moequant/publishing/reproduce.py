"""The command and the recipe that make a published checkpoint again."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from moequant.conversion import Recipe
from moequant.conversion.recipe import KEEP
from moequant.conversion.record import recorded_recipe
from moequant.dialects import REGISTRY, default_dialect
from moequant.errors import UnsupportedError
from moequant.formats import WRITABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RECIPE_FILE = "recipe.toml"
"""How the command calls the recipe, where an option does not say it all."""
_DEFAULT_SHARD_SIZE = "5GB"


def conversion_command(record: Mapping[str, Any], source: str, output: str) -> str:
    """The command that converts the source into the same bytes.

    Args:
        record: moequant.json.
        source: how the command calls the source.
        output: how it calls the output.

    Raises:
        RecipeError: the record has no valid recipe.
    """
    recipe, commit = recorded_recipe(record), _text(record.get("source"), "commit")
    words = ["moequant", "convert", source, output]
    words += ["--revision", commit] if commit else []
    words += _by_options(recipe) or ["--recipe", RECIPE_FILE]
    words += _dialect(record, recipe)
    if recipe.output.max_shard_size != _DEFAULT_SHARD_SIZE:
        words += ["--max-shard-size", recipe.output.max_shard_size]
    if "architecture_definition" in record:
        words += ["--architecture", "architecture.toml"]
    if "statistics" in record:
        words += ["--statistics", "statistics"]
    if "activation_scales" in record:
        words += ["--activation-scales", "activation-scales.safetensors"]
    return shlex.join(words)


def recipe_file(record: Mapping[str, Any]) -> str | None:
    """The recipe as TOML, where the command needs it; raises RecipeError."""
    recipe = recorded_recipe(record)
    return None if _by_options(recipe) else "\n".join(_toml(recipe)) + "\n"


def _by_options(recipe: Recipe) -> list[str]:
    """The options that stand for the recipe; none where only a file does."""
    first = recipe.rules[0]
    if first.format == KEEP or isinstance(first.activation_scales, str):
        return []
    plain = Recipe.for_format(first.format, first.options, first.activation_scales)
    if recipe.architectures or recipe.rules != plain.rules:
        return []
    words = ["--format", first.format]
    for name, value in first.options.items():
        words += ["--option", f"{name}={value}"]
    if first.activation_scales is not None:
        words += ["--activation-scales", str(first.activation_scales)]
    return words


def _dialect(record: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """The option for a dialect that is not what the formats get by default."""
    dialect = record.get("dialect")
    formats = {rule.format for rule in recipe.rules if rule.format in WRITABLE}
    quantized = [f for f in formats if not WRITABLE[f].is_plain]
    if not isinstance(dialect, str) or dialect not in REGISTRY or not quantized:
        return []
    try:
        defaults = {default_dialect(format) for format in quantized}
    except UnsupportedError:
        defaults = set()
    return [] if defaults == {dialect} else ["--dialect", dialect]


def _toml(recipe: Recipe) -> Iterator[str]:
    """The lines of a recipe. JSON's texts and lists of texts are also TOML's."""
    yield f"schema_version = {recipe.schema_version}"
    if recipe.summary:
        yield f"summary = {_json(recipe.summary)}"
    if recipe.architectures:
        yield f"architectures = {_json(recipe.architectures)}"
    for rule in recipe.rules:
        yield "\n[[rules]]"
        for key, value in rule.model_dump(exclude_defaults=True).items():
            if key == "options":
                pairs = (f"{_json(name)} = {_json(text)}" for name, text in value.items())
                yield f"options = {{ {', '.join(pairs)} }}"
            else:
                yield f"{key} = {_json(value)}"


def _json(value: object) -> str:
    # A delete character is the only one that JSON takes as it is and TOML does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(table: object, key: str) -> str | None:
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else None
