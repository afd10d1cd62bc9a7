"""The output of `moequant inspect` for a folder that `moequant prepare` wrote."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from moequant.cli.output import NEVER_RUN, Output, count, ranges, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.preparation import PreparedCheckpoint


def show(out: Output, prepared: PreparedCheckpoint, *, with_tensors: bool) -> None:
    """Print target, layouts, sizes and whether it is stale; reads only headers."""
    out.result(_describe(prepared, with_tensors=with_tensors), _show)


def _describe(prepared: PreparedCheckpoint, *, with_tensors: bool) -> dict[str, Any]:
    from moequant.runtime.backends import never_run_readers
    from moequant.runtime.prepared import layer_header, remedy_of

    folder, manifest = prepared.folder, prepared.manifest
    remedy = remedy_of(folder, manifest)
    document: dict[str, Any] = {
        "path": str(prepared.folder),
        "target": manifest.target,
        "moequant": manifest.moequant,
        "converted": str(prepared.converted.checkpoint.path),
        "architecture": prepared.converted.architecture.name,
        "experts": prepared.converted.moe.experts,
        "stale": prepared.staleness(),
        "bytes": sum(entry.bytes for entry in manifest.layers.values()),
        "layers": [
            {
                "layer": layer,
                "format": entry.format,
                "activations": entry.activations,
                "layout": entry.layout,
                "layout_version": entry.layout_version,
                "file": entry.file,
                "bytes": entry.bytes,
            }
            for layer, entry in manifest.layers.items()
        ],
        "never_run": never_run_readers({entry.layout for entry in manifest.layers.values()}),
    }
    if with_tensors:
        document["tensor_list"] = [
            {
                "name": info.name,
                "layer": layer,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.size_bytes,
                "file": entry.file,
            }
            for layer, entry in manifest.layers.items()
            for info in layer_header(folder / entry.file, entry, remedy).values()
        ]
    return document


def _show(out: Output, prepared: Mapping[str, Any]) -> None:
    layers = prepared["layers"]
    out.fields(
        {
            "prepared": f"{prepared['path']}, for {prepared['target']} by moequant "
            f"{prepared['moequant']}",
            "made from": prepared["converted"],
            "architecture": prepared["architecture"],
            "layers": ranges(sorted(entry["layer"] for entry in layers)),
            "experts": f"{prepared['experts']} per layer",
            "weights": f"{size(prepared['bytes'])} in {count(len(layers), 'file')}",
            "stale": prepared["stale"] or "no",
        }
    )
    out.line()
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in layers:
        layout = f"{entry['layout']}, version {entry['layout_version']}"
        groups[entry["format"], entry["activations"], layout].append(entry)
    out.table(
        ["format", "activations", "layout", ">layers", ">size"],
        [
            (*kind, str(len(members)), size(sum(entry["bytes"] for entry in members)))
            for kind, members in groups.items()
        ],
    )
    if prepared["never_run"]:
        out.line(f"for {' and '.join(prepared['never_run'])}: {NEVER_RUN}")
    if "tensor_list" in prepared:
        out.line()
        out.table(
            ["tensor", "dtype", "shape", ">size", "file"],
            [
                (t["name"], t["dtype"], str(t["shape"]), size(t["bytes"]), t["file"])
                for t in prepared["tensor_list"]
            ],
        )
