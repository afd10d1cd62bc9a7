"""Arguments of convert() that are checked before anything is read."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from moequant.conversion.recipe import (
    FROM_FILE,
    FROM_STATISTICS,
    KEEP,
    Recipe,
    load_recipe,
    parse_activation_scales,
)
from moequant.conversion.run import write_shards
from moequant.device import usable_device
from moequant.errors import ArgumentError, RecipeError, UnsupportedError
from moequant.statistics import InputScales, Statistics
from moequant.storage.locate import directory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from moequant.conversion.finished_shard import FinishedShard

    WriteShards = Callable[..., Iterator[FinishedShard]]

CPU = "cpu"
LOCAL = "local"
RAY = "ray"


def check_device(device: str, recipe: Recipe, executor: str) -> None:
    """Check that a device other than the CPU can be used and has something to do.

    Raises:
        ArgumentError: a device for a cluster.
        UnsupportedError: the device cannot be used.
        RecipeError: nothing is rounded by GPTQ.
    """
    if device == CPU:
        return
    if executor != LOCAL:
        raise ArgumentError(
            f"device {device!r} with executor {executor}, but machines of a cluster compute GPTQ "
            "on their CPUs; leave out one of the two"
        )
    if not any(rule.format != KEEP and rule.rounding is not None for rule in recipe.rules):
        raise RecipeError(
            f"device {device!r} is where GPTQ computes, but nothing is rounded by GPTQ; leave it "
            'out, or give the option rounding = "gptq"'
        )
    if (kind := usable_device(device).type) != "cuda":
        raise UnsupportedError(
            f"device {device!r} is of type {kind}, but GPTQ computes on cpu or cuda; give one of "
            "them"
        )


def choose_executor(text: str) -> WriteShards:
    """The function that writes shards, for "local", "ray" or "ray:ADDRESS"; see `run.write_shards`.

    Raises:
        ArgumentError: an unknown executor.
        UnsupportedError: Ray is not installed.
    """
    name, colon, address = text.partition(":")
    if text == LOCAL:
        return write_shards
    if name != RAY or (colon and not address):
        raise ArgumentError(
            f"executor {text!r}, but must be {LOCAL}, {RAY} or {RAY}:ADDRESS, such as "
            f"{RAY}:10.0.0.1:6379 or {RAY}:auto"
        )
    try:
        from moequant.conversion.cluster import write_shards_on_ray
    except ImportError as error:
        raise UnsupportedError(
            f"executor {text!r}: Ray cannot be imported here ({error}); install it with "
            "pip install 'moequant[ray]'"
        ) from error
    return partial(write_shards_on_ray, address=address or None)


def check_deletable(
    source: str | Path, revision: str | None, executor: str, statistics: Statistics | None
) -> None:
    """Check that shards of the source can be fetched and deleted one after the other.

    Raises:
        ArgumentError: they cannot, or all of the source is needed at once.
        CheckpointError: as `directory_of`.
    """
    if directory_of(source, revision) is not None:
        raise ArgumentError(
            f"{source}: a directory, but only shards that the conversion itself fetches from the "
            "hub are deleted; leave --delete-source-shards out, or give a hub repo id"
        )
    if executor != LOCAL:
        raise ArgumentError(
            f"executor {executor!r}: its machines read the whole source; leave out --executor or "
            "--delete-source-shards"
        )
    if statistics is not None:
        raise ArgumentError(
            f"{statistics.path}: statistics are compared with all weights of the source before the "
            "conversion begins; leave out --statistics or --delete-source-shards"
        )


def choose_recipe(
    format: str | None,
    options: Mapping[str, str] | None,
    recipe: Recipe | str | Path | None,
    activation_scales: str | float | None,
) -> Recipe:
    """The recipe for a format, or the one given; raises RecipeError as `convert`."""
    if (format is None) == (recipe is None):
        both = "" if format is None else ", not both"
        raise RecipeError(f"give a format or a recipe{both}")
    if format is not None:
        return Recipe.for_format(format, options, activation_scales)
    if options:
        raise RecipeError(
            f"options {', '.join(options)} are given beside a recipe, whose rules name their own; "
            "write them into the rules of the recipe"
        )
    if activation_scales not in (None, FROM_FILE):
        raise RecipeError(
            f"activation scales {activation_scales!r} beside a recipe, whose rules say where they "
            f'come from (activation_scales); give only the file for rules with "{FROM_FILE}"'
        )
    if isinstance(recipe, Recipe):
        return recipe
    assert recipe is not None
    return load_recipe(recipe)


def choose_scales(
    given: str | Path | float | None,
) -> tuple[str | float | None, InputScales | None]:
    """What a rule's `activation_scales` is, and the file of scales, if it is one.

    Raises:
        RecipeError: a number that no static scale may be.
        StatisticsError: as `InputScales.load`.
    """
    if given is None or given == FROM_STATISTICS:
        return FROM_STATISTICS if given else None, None
    with suppress(ValueError):
        given = float(given) if isinstance(given, str) else given
    if isinstance(given, int | float):
        try:
            return parse_activation_scales(given), None
        except ValueError as error:
            raise RecipeError(f"activation scales: {error}") from None
    return FROM_FILE, InputScales.load(given)
