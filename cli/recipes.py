"""moequant recipes [NAME]: list the recipes that come with moequant, or check and print one."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Mapping


@click.command(
    "recipes",
    short_help="List the recipes, or print one.",
    epilog=options.examples(
        "moequant recipes",
        "moequant recipes nvfp4-experts > mine.toml",
        "moequant convert source out --recipe mine.toml",
    ),
)
@click.argument(
    "name",
    required=False,
    metavar="[NAME-OR-FILE]",
    shell_complete=options.complete_recipe,
)
@options.json_option
def command(name: str | None, as_json: bool) -> None:
    """List the recipes that come with moequant, or check and print one, by name or from a file.

    Start your own recipe from a printed one: moequant recipes NAME > mine.toml
    """
    from moequant.conversion import load_recipe, shipped_recipes

    out = Output(as_json=as_json)
    if name is None:
        summaries = {recipe: load_recipe(recipe).summary for recipe in shipped_recipes()}
        out.result({"recipes": summaries}, _show_all)
    else:
        recipe = load_recipe(name).model_dump(mode="json")
        shipped = resources.files("moequant.recipes").joinpath(f"{name}.toml")
        file = shipped if name in shipped_recipes() else Path(name)
        out.result({"name": name, "recipe": recipe, "text": file.read_text("utf-8")}, _show)


def _show_all(out: Output, document: Mapping[str, Any]) -> None:
    out.table(["recipe", "summary"], list(document["recipes"].items()))


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.line(document["text"].removesuffix("\n"))
