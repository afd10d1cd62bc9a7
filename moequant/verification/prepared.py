"""Check that the prepared folders of a checkpoint hold its weights.

The portable weights, and static scales of activations, are packed again and compared with every
prepared layer, byte for byte. A worker holds one expert in memory.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError, MoequantError
from moequant.formats import get_format
from moequant.preparation.layers import layouts_for, packed_experts
from moequant.runtime.backends import TARGETS
from moequant.runtime.prepared import LayerFile, remedy_of
from moequant.runtime.prepared_manifest import how_to_prepare, prepared_folders, read_manifest
from moequant.storage.checkpoint import natural_key
from moequant.storage.disk import sha256_of
from moequant.storage.files import MANIFEST_FILE, PREPARED_FOLDER
from moequant.verification.differences import compare_tensors, differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from moequant.progress import Progress
    from moequant.runtime.backends import Layout
    from moequant.runtime.prepared_manifest import Manifest, PreparedLayer
    from moequant.verification.findings import Findings
    from moequant.verification.report import Problem
    from moequant.weights.converted import ConvertedCheckpoint


def check_prepared(
    converted: ConvertedCheckpoint,
    formats: Mapping[int, str],
    *,
    pool: Executor,
    progress: Progress,
    findings: Findings,
) -> tuple[str, ...]:
    """Check the prepared folder of every target; one problem is named for each layer.

    Args:
        converted: the portable weights.
        formats: format by layer whose experts are converted.
        pool: its threads work on a layer each.
        progress: receives the progress.
        findings: where problems go.

    Returns:
        The targets there are.
    """
    folders = prepared_folders(converted.checkpoint.path)
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            layouts = _layouts(manifest, formats, folder.name)
        except MoequantError as error:
            findings.add("prepared", folder.name, str(error))
            continue
        _check_manifest(folder, manifest, layouts, formats, converted, findings)
        # Those of another layout were named; nobody here can read them.
        readable = [
            n
            for n, entry in manifest.layers.items()
            if n in layouts and _kind(entry) == _wanted(formats[n], layouts[n])
        ]
        progress.start(
            f"prepared for {folder.name}", sum(manifest.layers[n].bytes for n in readable)
        )
        check = partial(_check_layer, folder, manifest, layouts, converted, progress)
        for layer, fault in zip(readable, pool.map(check, readable), strict=True):
            if fault is not None:
                findings.add("prepared", f"{folder.name}/{manifest.layers[layer].file}", fault)
        progress.finish()
    return tuple(folder.name for folder in folders)


def remedy_for(converted: Path, problems: Sequence[Problem]) -> str | None:
    """What to do if all `problems` of a checkpoint are those of prepared folders; else None."""
    names = [PurePosixPath(problem.name).parts for problem in problems]
    inner = [
        parts[1:] if parts[:1] == (PREPARED_FOLDER,) else parts
        for parts, problem in zip(names, problems, strict=True)
        if parts[:1] == (PREPARED_FOLDER,) or problem.check == "prepared"
    ]
    if len(inner) != len(problems):
        return None
    reformatted = {parts[0] for parts in inner if parts[-1].endswith(".format")}
    targets = sorted({parts[0] for parts in inner}, key=natural_key)
    root = converted / PREPARED_FOLDER
    return "; ".join(_remedy(root / t, same_formats=t not in reformatted) for t in targets)


def _remedy(folder: Path, *, same_formats: bool) -> str:
    if folder.name not in TARGETS:
        return f"remove {folder}, which is for no target"
    try:
        return remedy_of(folder, read_manifest(folder), same_formats=same_formats)
    except CheckpointError:
        return how_to_prepare(folder)


def _layouts(manifest: Manifest, formats: Mapping[int, str], target: str) -> dict[int, Layout]:
    """The layout that each layer must be in, for the activations it was prepared for.

    Where weights decide between several, it is the one that the manifest says, if it is one of
    these: packing again shows whether it holds the weights.
    """
    layouts = {}
    for layer, format in formats.items():
        entry = manifest.layers.get(layer)
        activations = get_format(format).activations if entry is None else entry.activations
        first, *others = layouts_for(format, target, activations)
        stated = [other for other in others if entry is not None and entry.layout == other.name]
        layouts[layer] = (stated or [first])[0]
    return layouts


def _kind(entry: PreparedLayer) -> dict[str, object]:
    """What a manifest says of a layer's tensors."""
    return {
        "format": entry.format,
        "layout": entry.layout,
        "layout_version": entry.layout_version,
    }


def _wanted(format: str, layout: Layout) -> dict[str, object]:
    """What it should say."""
    return {"format": format, "layout": layout.name, "layout_version": layout.version}


def _check_manifest(
    folder: Path,
    manifest: Manifest,
    layouts: Mapping[int, Layout],
    formats: Mapping[int, str],
    converted: ConvertedCheckpoint,
    findings: Findings,
) -> None:
    """Compare the manifest with the files, and its layouts with this version's."""
    found = {
        "target": manifest.target,
        "originals": {file: state[:1] for file, state in manifest.originals.items()},
        "layers": {str(n): _kind(e) for n, e in manifest.layers.items()},
    }
    expected = {
        "target": folder.name,
        "originals": {f: state[:1] for f, state in converted.checkpoint.file_state().items()},
        "layers": {str(n): _wanted(formats[n], x) for n, x in layouts.items()},
    }
    for place, message in differences(found, expected, f"{folder.name}/{MANIFEST_FILE}"):
        findings.add("prepared", place, message)
    known = {MANIFEST_FILE, *(entry.file for entry in manifest.layers.values())}
    for name in sorted({entry.name for entry in folder.iterdir()} - known):
        findings.add("prepared", f"{folder.name}/{name}", f"not in {MANIFEST_FILE}")


def _check_layer(
    folder: Path,
    manifest: Manifest,
    layouts: Mapping[int, Layout],
    converted: ConvertedCheckpoint,
    progress: Progress,
    layer: int,
) -> str | None:
    """The problem of a layer's file; None if there is none."""
    entry, moe = manifest.layers[layer], converted.moe
    digest = hashlib.sha256()
    try:
        file = LayerFile.open(folder, layer, manifest.layers[layer], remedy_of(folder, manifest))
        if sha256_of(folder / entry.file) != entry.sha256:
            return f"its SHA-256 is not the one in {MANIFEST_FILE}"
        packed = packed_experts(
            converted, layer, layouts[layer], digest, static=entry.has_input_scales
        )
        for expert, expected in enumerate(packed):
            if expert == 0:
                file.check(expected, experts=moe.experts)
            for name, tensor in expected.items():
                difference = compare_tensors(file.read(name, expert), tensor)
                if difference is not None:
                    return f"{name} of expert {expert}: {difference}"
            progress.advance(entry.bytes // moe.experts, moe.whereabouts(layer))
    except MoequantError as error:
        return str(error).removeprefix(f"{folder / entry.file}: ")
    if digest.hexdigest() != entry.originals_sha256:
        return f"its originals_sha256 in {MANIFEST_FILE} is not that of the portable weights"
    return None
