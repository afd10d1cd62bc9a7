"""moequant prepare CONVERTED --target sm90|sm100."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import NEVER_RUN, Output, count, ranges, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.prepared_manifest import PreparedLayer

_MADE = ("format", "activations", "layout")


@click.command(
    "prepare",
    short_help="Write the tensors that kernels read.",
    epilog=options.examples(
        "moequant prepare qwen3-nvfp4 --target sm90",
        "moequant prepare qwen3-nvfp4 --target sm100 --activations nvfp4",
    ),
)
@click.argument("converted", type=options.DIRECTORY)
@options.target_option
@options.activations_option
@click.option("--overwrite", is_flag=True, help="Write again although the folder fits.")
@options.recorded_architecture_option
@options.json_option
@options.quiet_option
def command(
    converted: str,
    target: str,
    activations: ActivationsChoice,
    overwrite: bool,
    architecture: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write kernel-ready tensors to CONVERTED/moequant-prepared/TARGET.

    The portable files, which other engines read, do not change. A target has one folder: one that
    was written for other activations, or from other files, is replaced.
    """
    from moequant.preparation import prepare
    from moequant.runtime.backends import never_run_readers

    out = Output(as_json=as_json, quiet=quiet)
    with out.progress() as progress:
        result = prepare(
            converted,
            target=target,
            activations=activations,
            overwrite=overwrite,
            architecture=architecture,
            progress=progress,
        )
    layers = result.manifest.layers
    document = {
        "state": result.state,
        "folder": str(result.folder),
        "target": target,
        "replaced": None if result.replaced is None else _made(result.replaced.layers.values()),
        "bytes": sum(layer.bytes for layer in layers.values()),
        "layers": {
            number: {
                "format": layer.format,
                "activations": layer.activations,
                "layout": layer.layout,
                "bytes": layer.bytes,
            }
            for number, layer in layers.items()
        },
        "never_run": never_run_readers({layer.layout for layer in layers.values()}),
    }
    out.result(document, _show)


def _made(layers: Iterable[PreparedLayer]) -> list[dict[str, str]]:
    """Format, activations and layout of layers, each once."""
    made = {(one.format, one.activations, one.layout) for one in layers}
    return [dict(zip(_MADE, one, strict=True)) for one in sorted(made)]


def _show(out: Output, document: Mapping[str, Any]) -> None:
    layers = document["layers"].values()
    layouts = ", ".join(sorted({f"{layer['format']} as {layer['layout']}" for layer in layers}))
    amount = f"{count(len(layers), 'layer')}, {size(document['bytes'])}, {layouts}"
    if document["state"] == "already prepared":
        out.line(f"{document['folder']}: already prepared, nothing to do ({amount})")
    else:
        out.line(f"{document['folder']}: {amount}")
    now = {tuple(layer[key] for key in _MADE) for layer in layers}
    before = document["replaced"] or []
    if before and {tuple(one[key] for key in _MADE) for one in before} != now:
        text = "{format} as {layout} for activations {activations}"
        was = ", ".join(text.format(**one) for one in before)
        out.line(f"replaced what was there: {was}")
    for name, numbers in _second_choices(document).items():
        layers_are = "layer" if len(numbers) == 1 else "layers"
        out.line(f"{layers_are} {ranges(sorted(numbers))} as {name}, for {_why(name)}")
    if document["never_run"]:
        out.line(f"for {' and '.join(document['never_run'])}: {NEVER_RUN}")


def _second_choices(document: Mapping[str, Any]) -> dict[str, list[int]]:
    """Layers that the best layout of their backend does not hold, by the layout they are in."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, layer in document["layers"].items():
        if _why(layer["layout"]):
            found[layer["layout"]].append(number)
    return found


def _why(name: str) -> str:
    """Of which weights a layout is; empty for the first one of a backend."""
    from moequant.runtime.backends import REGISTRY

    every = {x.name: x.why for backend in REGISTRY.values() for x in backend.layouts}
    return every.get(name, "")
