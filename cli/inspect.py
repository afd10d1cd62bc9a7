"""moequant inspect CHECKPOINT: its architecture, sizes and tensors, from headers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import inspect_prepared, options
from moequant.cli.output import Output, count, origin_of, quantization, ranges, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.models import Architecture, MoeConfig, TensorRole
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo


@click.command(
    "inspect",
    short_help="Show what a checkpoint contains.",
    epilog=options.examples(
        "moequant inspect Qwen/Qwen3-30B-A3B",
        "moequant inspect out --tensors",
    ),
)
@click.argument("checkpoint", type=options.DIRECTORY)
@click.option(
    "--tensors",
    is_flag=True,
    help="Also list every tensor with its role, orientation and format.",
)
@options.architecture_option
@options.revision_option
@options.json_option
def command(
    checkpoint: str, tensors: bool, architecture: str | None, revision: str | None, as_json: bool
) -> None:
    """Show what CHECKPOINT contains: a source, a converted or a prepared checkpoint.

    CHECKPOINT is a directory or the id of a repository on the Hugging Face hub. Reads config.json
    and headers, but no weights.
    """
    from moequant.preparation import PreparedCheckpoint
    from moequant.storage.folder import is_prepared_folder
    from moequant.storage.hub_folder import open_headers
    from moequant.storage.locate import directory_of

    out = Output(as_json=as_json)
    path = directory_of(checkpoint, revision)
    if path is not None and is_prepared_folder(path):
        prepared = PreparedCheckpoint.open(
            path, architecture=architecture, quantized_activations=True
        )
        inspect_prepared.show(out, prepared, with_tensors=tensors)
        return
    opened = open_headers(checkpoint, revision)
    out.result(_describe(opened, architecture, with_tensors=tensors), _show)


def _describe(checkpoint: Checkpoint, file: str | None, *, with_tensors: bool) -> dict[str, Any]:
    from moequant.models import ROUTED_EXPERTS, find_architecture
    from moequant.runtime.prepared_manifest import prepared_folders
    from moequant.weights.converted import described_architectures
    from moequant.weights.sizes import roles_of, size_by_role
    from moequant.weights.source_model import seen_as_source

    own = described_architectures(checkpoint.path, file)
    converted = seen_as_source(checkpoint, own)
    architecture = find_architecture(checkpoint.config, own, names=checkpoint.tensors)
    moe = architecture.read_config(checkpoint.config)
    rows = list(roles_of(checkpoint.tensors.values(), architecture, converted))
    document: dict[str, Any] = {
        "path": str(checkpoint.path),
        **origin_of(checkpoint),
        "architecture": architecture.name,
        "architecture_by": architecture.origin,
        "layers": moe.layers,
        "expert_layers": sorted({r.layer for _, r, _ in rows if r.role == ROUTED_EXPERTS}),
        "experts": moe.experts,
        "top_k": moe.top_k,
        "hidden": moe.hidden,
        "intermediate": moe.intermediate,
        "activation": moe.act_fn.name,
        "files": checkpoint.file_bytes,
        "tensors": len(rows),
        "bytes": sum(info.size_bytes for info, _, _ in rows),
        "dialect": converted and converted.dialect.name,
        "formats": sorted({format for _, _, format in rows if format}),
        "prepared": [str(folder) for folder in prepared_folders(checkpoint.path)],
        "groups": size_by_role(rows),
    }
    if with_tensors:
        document["tensor_list"] = [_describe_tensor(*row, architecture, moe) for row in rows]
    return document


def _describe_tensor(
    info: TensorInfo,
    role: TensorRole,
    format: str | None,
    architecture: Architecture,
    moe: MoeConfig,
) -> dict[str, Any]:
    from moequant.models import orientation

    converted = format is not None
    return {
        "name": info.name,
        "role": role.role,
        "layer": role.layer,
        "expert": role.expert,
        "projection": role.projection,
        "orientation": orientation(architecture, moe, role, info.shape, converted=converted),
        "format": format,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "bytes": info.size_bytes,
        "file": info.file,
    }


def _show(out: Output, checkpoint: Mapping[str, Any]) -> None:
    fields = {
        "checkpoint": _place(checkpoint),
        "architecture": _architecture(checkpoint),
        "layers": f"{checkpoint['layers']}, with experts: {ranges(checkpoint['expert_layers'])}",
        "experts": f"{checkpoint['experts']} per layer, {checkpoint['top_k']} per token",
        "sizes": f"hidden {checkpoint['hidden']}, intermediate {checkpoint['intermediate']}",
        "weights": f"{size(checkpoint['bytes'])} in {count(checkpoint['tensors'], 'tensor')}, "
        f"{count(len(checkpoint['files']), 'file')}",
        "quantization": quantization(checkpoint["dialect"], checkpoint["formats"]),
    }
    if checkpoint["prepared"]:
        fields["prepared"] = ", ".join(checkpoint["prepared"])
    out.fields(fields)
    out.line()
    out.table(
        ["role", "format", ">tensors", "dtypes", ">size"],
        [
            (
                group["role"],
                group["format"] or "",
                str(group["tensors"]),
                " ".join(group["dtypes"]),
                size(group["bytes"]),
            )
            for group in checkpoint["groups"]
        ],
    )
    if "tensor_list" in checkpoint:
        out.line()
        out.table(
            ["tensor", "role", "orientation", "format", "dtype", "shape", ">size", "file"],
            [
                [str(t[key] or "") for key in ("name", "role", "orientation", "format", "dtype")]
                + [str(t["shape"]), size(t["bytes"]), t["file"]]
                for t in checkpoint["tensor_list"]
            ],
        )


def _place(checkpoint: Mapping[str, Any]) -> str:
    if checkpoint["repository"] is None:
        return f"{checkpoint['path']}"
    return f"{checkpoint['repository']} on the hub, commit {checkpoint['commit']}"


def _architecture(checkpoint: Mapping[str, Any]) -> str:
    by = checkpoint["architecture_by"]
    return f"{checkpoint['architecture']}, from {by}" if by else f"{checkpoint['architecture']}"
