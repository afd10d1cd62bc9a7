"""Options that several commands share, each defined once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Name(click.ParamType):
    """One of the names of a registry, read when it is needed: registries import torch."""

    def __init__(self, name: str, load: Callable[[], Iterable[str]]) -> None:
        self.name = name
        self._load = load

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Accept a known name; anything else is wrong usage."""
        known = list(self._load())
        if value not in known:
            self.fail(f"{value!r} is not a {self.name}; there are: {', '.join(known)}", param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that begin with `incomplete`."""
        return [CompletionItem(name) for name in self._load() if name.startswith(incomplete)]


class RecipeName(click.ParamType):
    """The name of a recipe that comes with moequant, or a file; the library tells which."""

    name = "recipe"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Shipped names that begin with `incomplete`, and files."""
        from moequant.conversion import shipped_recipes

        names = [n for n in shipped_recipes() if n.startswith(incomplete)]
        return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


class Size(click.ParamType):
    """A number of bytes such as 5GB, handed on as it was written."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Accept what the library can read; anything else is wrong usage."""
        from moequant.conversion.recipe import parse_size

        try:
            parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


class LayerCount(click.ParamType):
    """A number of layers, or the words `first` and `all`."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A word stays one; a number becomes an int."""
        if value in _LAYER_WORDS:
            return value
        if not value.isascii() or not value.isdigit():
            self.fail(f"{value!r} is not a number, nor first or all", param, ctx)
        return int(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The words."""
        return [CompletionItem(word) for word in _LAYER_WORDS if word.startswith(incomplete)]


_LAYER_WORDS = ("first", "all")


def _formats() -> Iterable[str]:
    from moequant.formats import REGISTRY

    return REGISTRY


def _dialects() -> Iterable[str]:
    from moequant.dialects import REGISTRY

    return REGISTRY


def _targets() -> Iterable[str]:
    from moequant.layouts.targets import TARGETS

    return TARGETS


DIRECTORY = click.Path(file_okay=False)
"""Completed as a directory. Whether one is there the library says: it may be a hub repository."""

format_option = click.option(
    "--format",
    type=Name("format", _formats),
    metavar="NAME",
    help="Convert the routed experts, and nothing else, into this format; see `moequant formats`.",
)
recipe_option = click.option(
    "--recipe",
    type=RecipeName(),
    metavar="NAME-OR-FILE",
    help="Convert as a recipe says; see `moequant recipes`.",
)
dialect_option = click.option(
    "--dialect",
    type=Name("dialect", _dialects),
    metavar="NAME",
    help="Names and config of the output, in place of the recipe's or the format's own.",
)
revision_option = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit, if the source is a hub repository."
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Units of work done at the same time.  [default: one a core, at most 8]",
)
max_shard_size_option = click.option(
    "--max-shard-size", type=Size(), metavar="SIZE", help="Upper bound of a shard.  [default: 5GB]"
)
target_option = click.option(
    "--target",
    type=Name("target", _targets),
    metavar="NAME",
    required=True,
    help="Whose kernels: sm90 (Hopper) or sm100 (Blackwell).",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is already there.")
layers_option = click.option(
    "--layers",
    type=LayerCount(),
    metavar="N",
    help="How many expert layers to run: a number, first or all; weights are verified in every "
    "one.  [default: 3]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document, also for an error."
)
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Print errors and warnings only; no progress."
)
