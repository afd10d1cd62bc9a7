"""The command that makes a checkpoint again, and the files that it names, by its moequant.json.

The command that was used is not recorded; this one plans the same.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from moequant.conversion.recipe import FROM_FILE, OutputSettings, Recipe
from moequant.conversion.record import recorded_recipe
from moequant.errors import MoequantError
from moequant.storage.documents import object_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RECIPE_FILE = "recipe.toml"
"""How the command calls the recipe, where options do not say it all."""
ARCHITECTURE_FILE = "architecture.toml"
"""How it calls the description of an architecture that is not in the built-in table."""
# Of what the record has a digest alone, the command has a word to replace.
_STATISTICS, _ACTIVATION_SCALES = "STATS", "FILE"


def conversion_command(record: Mapping[str, Any], source: str, output: str) -> str:
    """The command that converts the source into the same bytes.

    Args:
        record: moequant.json.
        source: how the command calls the source, if the record names no commit of a repository.
        output: how it calls the output.

    Raises:
        RecipeError: the record has no valid recipe.
    """
    recipe, commit = recorded_recipe(record), _recorded(record, "commit")
    words = ["moequant", "convert", source, output]
    if commit is not None:
        words[2:] = [_recorded(record, "repository") or source, output, "--revision", commit]
    words += _by_options(recipe) or ["--recipe", RECIPE_FILE]
    if record.get("architecture_definition") is not None:
        words += ["--architecture", ARCHITECTURE_FILE]
    if record.get("statistics") is not None:
        words += ["--statistics", _STATISTICS]
    if record.get("activation_scales") is not None:
        words += ["--activation-scales", _ACTIVATION_SCALES]
    return shlex.join(words)


def recipe_file(record: Mapping[str, Any]) -> str | None:
    """RECIPE_FILE, if the command needs one; raises as `conversion_command`."""
    recipe = recorded_recipe(record)
    return None if _by_options(recipe) else recipe_toml(recipe)


def architecture_file(record: Mapping[str, Any]) -> str | None:
    """ARCHITECTURE_FILE, if the command needs one."""
    definition = record.get("architecture_definition")
    if not isinstance(definition, dict):
        return None
    return "\n".join(("[[architecture]]", *_pairs(definition))) + "\n"


def recipe_toml(recipe: Recipe) -> str:
    """The file that `load_recipe` reads as this recipe; fields with their default are left out."""
    return "\n".join(_lines(recipe)) + "\n"


def _by_options(recipe: Recipe) -> list[str]:
    """The options that stand for the recipe; none where only a file does."""
    rule, output = recipe.rules[0], recipe.output
    try:
        same = Recipe.for_format(rule.format, rule.options, rule.activation_scales)
    except MoequantError:
        return []  # "keep", which no option gives
    if (same.rules, same.architectures) != (recipe.rules, recipe.architectures):
        return []
    words = ["--format", rule.format]
    words += [word for k, v in rule.options.items() for word in ("--option", f"{k}={v}")]
    if rule.activation_scales not in (None, FROM_FILE):
        words += ["--activation-scales", str(rule.activation_scales)]
    if output.dialect is not None:
        words += ["--dialect", output.dialect]
    if output.max_shard_size != OutputSettings().max_shard_size:
        words += ["--max-shard-size", output.max_shard_size]
    return words


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


def _recorded(record: Mapping[str, Any], key: str) -> str | None:
    """A text that the record says of the source."""
    value = object_at(record, "source").get(key)
    return value if isinstance(value, str) else None
