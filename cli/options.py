"""Options that several commands share, each defined once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_Command = TypeVar("_Command", bound="Callable[..., Any] | click.Command")


def _formats() -> Iterable[str]:
    from moequant.formats import CONVERTIBLE

    return CONVERTIBLE


def _targets_of_conversion() -> Iterable[str]:
    from moequant.formats import WRITABLE

    return WRITABLE


def _dialects() -> Iterable[str]:
    from moequant.dialects import REGISTRY

    return REGISTRY


def _targets() -> Iterable[str]:
    from moequant.layouts.targets import TARGETS

    return TARGETS


def _name_option(
    flag: str, load: Callable[[], Iterable[str]], **attributes: Any
) -> Callable[[_Command], _Command]:
    """An option that takes one of a registry's names.

    They are loaded when a value is there to be checked or completed: registries import torch.
    """

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in (known := list(load())):
            raise click.BadParameter(f"{value!r} is none of {', '.join(known)}", ctx, param)
        return value

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in load() if name.startswith(incomplete)]

    return click.option(flag, metavar="NAME", callback=check, shell_complete=complete, **attributes)


def complete_recipe(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of shipped recipes that begin with `incomplete`, and files."""
    from moequant.conversion import shipped_recipes

    names = [name for name in shipped_recipes() if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


def _check_size(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A size the library can read, handed on as it was written."""
    if value is None:
        return None
    from moequant.conversion.recipe import parse_size

    try:
        parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return value


def _check_layers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> str | int | None:
    """A number of layers, or the word for all of them."""
    if value is None or value == "all":
        return value
    if value.isascii() and value.isdigit():
        return int(value)
    raise click.BadParameter(f"{value!r} is not a number, nor all", ctx, param)


def check_written_file(
    ctx: click.Context, param: click.Parameter, value: Path | None
) -> Path | None:
    """A file that can be written, asked before minutes are spent on what goes there; a callback."""
    if value is None:
        return None
    if not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is no folder; make it first", ctx, param)
    from moequant.errors import MoequantError
    from moequant.storage.writable import check_writable

    try:
        check_writable(value)
    except MoequantError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return value


class _Directory(click.Path):
    """The path of a directory, or the id of a repository."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click.Path, but for what can be neither."""
        if not value:  # which is the current directory for the system
            self.fail("it is empty; write . for the current directory", param, ctx)
        if isinstance(value, str) and any("\udc80" <= c <= "\udcff" for c in value):
            self.fail(f"{value!r} is not UTF-8, and safetensors opens no such path", param, ctx)
        return super().convert(value, param, ctx)


DIRECTORY = _Directory(file_okay=False)
"""Completed as a directory. Whether one is there the library says: it may be a hub repository."""

format_option = _name_option(
    "--format",
    _targets_of_conversion,
    help="Convert the routed experts, and nothing else, into this format; see `moequant formats`. "
    "bf16 gives every weight that is quantized back.",
)
benched_format_option = _name_option(
    "--format",
    _formats,
    default="fp8_block",
    show_default=True,
    help="Format of the weights; see `moequant formats`.",
)
converted_format_option = _name_option(
    "--format", _targets_of_conversion, help="Format to convert into.  [default: every one]"
)
source_format_option = _name_option(
    "--source-format", _formats, help="Format of what is converted.  [default: none, BF16]"
)
architecture_option = click.option(
    "--architecture",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Describe the model in a TOML file, in place of our table; see docs/architectures.md.",
)
recorded_architecture_option = click.option(
    "--architecture",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Describe the model in a TOML file; needed where moequant.json and our table do not.",
)
recipe_option = click.option(
    "--recipe",
    metavar="NAME-OR-FILE",
    shell_complete=complete_recipe,
    help="Convert as a recipe says; see `moequant recipes`.",
)
dialect_option = _name_option(
    "--dialect",
    _dialects,
    help="Names and config of the output, in place of the recipe's or the format's own.",
)
revision_option = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit, if the source is a hub repository."
)
workers_option = click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Units of work done at the same time.  [default: one a core, at most 8]",
)
max_shard_size_option = click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=_check_size,
    help="Upper bound of a shard.  [default: the recipe's, or 5GB]",
)
target_option = _name_option(
    "--target",
    _targets,
    required=True,
    help="Whose kernels: sm90 (Hopper) or sm100 (Blackwell).",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is already there.")
layers_option = click.option(
    "--layers",
    metavar="N",
    callback=_check_layers,
    help="How many expert layers to run: a number, or all; weights are verified in every one.  "
    "[default: 3]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document, also for an error."
)
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Print errors and warnings only; no progress."
)
