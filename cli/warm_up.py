"""moequant warm-up CONVERTED."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output, count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.warm_up import Mode


@click.command(
    "warm-up",
    short_help="Compile the kernels that a checkpoint will run.",
    epilog=options.examples(
        "moequant warm-up qwen3-nvfp4",
        "moequant warm-up qwen3-nvfp4 --max-tokens 1024 --mode relax",
        "moequant warm-up qwen3-mxfp4 --activations fp8_token",
    ),
)
@click.argument("converted", type=options.DIRECTORY)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=8192, show_default=True, metavar="M",
    help="Compile for calls of 1 to M tokens.",
)  # fmt: skip
@click.option(
    "--mode",
    type=click.Choice(["full", "relax", "skip"]),
    default="full",
    show_default=True,
    help="full: compile for every M; relax: for powers of two and the largest, others compile on "
    "first use; skip: compile nothing.",
)
@click.option(
    "--device",
    default="cuda",
    show_default=True,
    metavar="DEVICE",
    help="Device the experts will run on.",
)
@options.backend_option("Backend that will run; by default the best.")
@options.activations_option
@options.recorded_architecture_option
@options.json_option
@options.quiet_option
def command(
    converted: str,
    max_tokens: int,
    mode: Mode,
    device: str,
    backend: str | None,
    activations: ActivationsChoice,
    architecture: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compile the kernels that the experts of CONVERTED need, and cache them on disk.

    Layers of equal format and activation function share kernels: one layer of each kind is loaded.
    """
    from moequant.runtime.warm_up import warm_up_checkpoint

    out = Output(as_json=as_json, quiet=quiet)
    with out.progress() as progress:
        warmed = warm_up_checkpoint(
            converted,
            max_tokens=max_tokens,
            mode=mode,
            device=device,
            backend=backend,
            activations=activations,
            architecture=architecture,
            progress=progress,
        )
    document = {
        "device": device,
        "max_tokens": max_tokens,
        "mode": mode,
        "layers": [
            {
                "format": kind.format,
                "activations": kind.activations,
                "act_fn": kind.act_fn,
                "backend": kind.backend,
                "kernel_sets": kind.tokens,
            }
            for kind in warmed
        ],
    }
    out.result(document, _show)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    if document["mode"] == "skip":
        out.line("nothing compiled; kernels compile on first use")
    for kind in document["layers"]:
        tokens = ", ".join(map(str, kind["kernel_sets"]))
        done = f"{count(len(kind['kernel_sets']), 'kernel set')} compiled, run at {tokens} tokens"
        out.line(
            f"{kind['format']} with activations {kind['activations']} and {kind['act_fn']} by "
            f"{kind['backend']}: "
            f"{done if kind['kernel_sets'] else 'nothing to compile'}"
        )
