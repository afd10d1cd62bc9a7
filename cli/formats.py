"""moequant formats: list formats, dialects and architectures, and what runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from moequant.formats import Format
    from moequant.runtime.backends import Backend

_SHAPE = (2048, 4096)
"""[N, K] of a weight for counting bits: large compared with every block, and whole blocks."""


@click.command("formats", short_help="List formats, dialects and backends.")
@click.option(
    "--architectures",
    is_flag=True,
    help="List the architectures instead, with the dialect of each format and how each is tested.",
)
@click.option("--markdown", is_flag=True, help="With --architectures: print Markdown tables.")
@options.json_option
def command(architectures: bool, markdown: bool, as_json: bool) -> None:
    """List formats and dialects, and what converts and runs them on this machine."""
    if markdown and (as_json or not architectures):
        raise click.UsageError("--markdown needs --architectures and excludes --json")
    if architectures:
        _list_architectures(Output(as_json=as_json), as_markdown=markdown)
        return
    from moequant.dialects import REGISTRY as DIALECTS
    from moequant.formats import CONVERTIBLE as FORMATS

    document = {
        "formats": [_describe(format) for format in FORMATS.values()],
        "dialects": [
            {"name": d.name, "summary": d.summary, "formats": list(d.carried)}
            for d in DIALECTS.values()
        ],
        "quantizers": list(_quantizers()),
        "backends": list(_backends()),
    }
    Output(as_json=as_json).result(document, _show)


def _list_architectures(out: Output, *, as_markdown: bool) -> None:
    from moequant.cli import architectures
    from moequant.formats import CONVERTIBLE

    document = {
        "formats": list(CONVERTIBLE),
        "architectures": architectures.describe_architectures(),
    }
    if as_markdown:
        out.line(architectures.markdown(document))
    else:
        out.result(document, architectures.show_architectures)


def _describe(format: Format) -> dict[str, Any]:
    from moequant.dialects import default_dialect
    from moequant.formats.base import WHOLE

    return {
        "name": format.name,
        "summary": format.summary,
        "block": [None if extent == WHOLE else extent for extent in format.block],
        "bits_per_weight": _bits_per_weight(format),
        "activations": format.activations,
        "default_dialect": default_dialect(format.name),
        "targets": list(_targets(format.name)),
        "options": {
            name: {"default": values[0], "values": list(values)}
            for name, values in format.options.items()
        },
    }


def _bits_per_weight(format: Format) -> float:
    N, K = _SHAPE
    bits = 8 * sum(spec.size_bytes for spec in format.specs(_SHAPE).values())
    return round(bits / (N * K), 3)


def _targets(format: str) -> Iterator[str]:
    """Targets whose kernels take the format."""
    from moequant.preparation.targets import backends_for
    from moequant.runtime.backends import TARGETS

    return (target for target in TARGETS if backends_for(format, target))


def _quantizers() -> Iterator[dict[str, Any]]:
    """Whether each quantizer runs here, or why not. Every quantizer supports every format."""
    from moequant.quantizers import NativeQuantizer, TorchQuantizer, choose_quantizer

    chosen = choose_quantizer()
    for quantizer in (NativeQuantizer, TorchQuantizer):
        by_default = quantizer is type(chosen.quantizer)
        yield {
            "quantizer": quantizer.name,
            "summary": quantizer.summary,
            "runs": by_default or quantizer is TorchQuantizer,
            "by_default": by_default,
            "reason": chosen.reason if quantizer is NativeQuantizer else None,
        }


def _backends() -> Iterator[dict[str, Any]]:
    """Whether each backend runs each format on each of this machine's devices, or why not."""
    from moequant.formats import CONVERTIBLE as FORMATS
    from moequant.runtime.backends import backends

    for device in _devices():
        for backend in backends().values():
            for format in FORMATS.values():
                reason = _refusal(backend, format, device)
                yield {
                    "device": str(device),
                    "backend": backend.name,
                    "format": format.name,
                    "runs": reason is None,
                    "by_default": reason is None and device.type in backend.default_on,
                    "reason": reason,
                }


def _devices() -> Iterator[torch.device]:
    import torch

    yield torch.device("cpu")
    if torch.cuda.is_available():
        yield torch.device("cuda")


def _refusal(backend: Backend, format: Format, device: torch.device) -> str | None:
    """Why the backend cannot run a layer of Qwen3-30B-A3B's sizes; None if it can."""
    from moequant.runtime.backends import Workload
    from moequant.runtime.select import why_not

    workload = Workload(
        format=format.name,
        activations=format.activations,
        experts=128,
        hidden=2048,
        intermediate=768,
        device=device,
    )
    return why_not(backend, workload)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.table(
        ["format", ">block", ">bits", "dialect", "targets", "what it is"],
        [
            (
                format["name"],
                "x".join(str(n or axis) for n, axis in zip(format["block"], "NK", strict=True)),
                f"{format['bits_per_weight']:g}",
                format["default_dialect"],
                " ".join(format["targets"]),
                format["summary"],
            )
            for format in document["formats"]
        ],
    )
    out.line()
    out.table(
        ["format", "option", "default", "or"],
        [
            (format["name"], name, option["default"], ", ".join(option["values"][1:]))
            for format in document["formats"]
            for name, option in format["options"].items()
        ],
    )
    out.line()
    out.table(
        ["dialect", "formats", "what it is"],
        [(d["name"], ", ".join(d["formats"]), d["summary"]) for d in document["dialects"]],
    )
    out.line()
    out.table(
        ["quantizer", "converts", "how"],
        [(row["quantizer"], _verdict(row), row["summary"]) for row in document["quantizers"]],
    )
    out.line()
    out.table(
        ["device", "backend", "format", "runs"],
        [
            (row["device"], row["backend"], row["format"], _verdict(row))
            for row in document["backends"]
        ],
    )


def _verdict(row: Mapping[str, Any]) -> str:
    if not row["runs"]:
        return f"no: {row['reason']}"
    return "by default" if row["by_default"] else "when named"
