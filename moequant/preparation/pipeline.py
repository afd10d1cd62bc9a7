"""prepare(): the one function behind `moequant prepare`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moequant._version import __version__
from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.checkpoint.writer import fsync_directory, replace_file
from moequant.errors import CheckpointError, UnsupportedError
from moequant.layouts.targets import kernel_layout
from moequant.models import PROJECTIONS
from moequant.preparation.layers import prepared_layer_file, write_layer
from moequant.preparation.manifest import (
    MANIFEST_FILE,
    Manifest,
    PreparedLayer,
    read_manifest,
)
from moequant.progress import SilentProgress

if TYPE_CHECKING:
    from moequant.progress import Progress

PREPARED_FOLDER = "moequant-prepared"


@dataclass(frozen=True, kw_only=True)
class PreparedResult:
    """What `prepare` did.

    Attributes:
        folder: where the kernel-ready tensors lie.
        manifest: what the folder says of itself.
        state: "prepared" or "already prepared".
    """

    folder: Path
    manifest: Manifest
    state: Literal["prepared", "already prepared"]


def prepare(
    converted: str | Path,
    *,
    target: str,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PreparedResult:
    """Write kernel-ready tensors of a converted checkpoint to its folder moequant-prepared/TARGET.

    The portable files stay as they are. A folder made from other originals is replaced: it holds
    nothing that cannot be made again.

    Args:
        converted: a converted checkpoint.
        target: "sm90" (Hopper) or "sm100" (Blackwell).
        overwrite: write anew even if the folder fits.
        progress: told what is done.

    Raises:
        CheckpointError: not a converted checkpoint, or a damaged one.
        UnsupportedError: no kernel of the target takes the format, or not in this shape.
        MoequantError: the folder cannot be written.
    """
    checkpoint = ConvertedCheckpoint.open(Path(converted))
    folder = checkpoint.checkpoint.path / PREPARED_FOLDER / target
    formats = _expert_formats(checkpoint)
    layouts = {format: kernel_layout(format, target) for format in formats.values()}
    if not overwrite and _fits(folder, checkpoint):
        return PreparedResult(
            folder=folder, manifest=read_manifest(folder), state="already prepared"
        )
    report = progress or SilentProgress()
    report.start(f"preparing for {target}", _total_bytes(checkpoint, formats))
    partial = folder.with_name(f".{target}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        before = checkpoint.checkpoint.file_state()
        layers = {}
        for layer, format in formats.items():
            layout = layouts[format]
            file = prepared_layer_file(layer)
            size, sha256, originals = write_layer(checkpoint, layer, layout, partial / file, report)
            layers[layer] = PreparedLayer(
                file=file,
                bytes=size,
                sha256=sha256,
                format=format,
                layout=layout.name,
                layout_version=layout.version,
                originals_sha256=originals,
            )
        manifest = Manifest(moequant=__version__, target=target, originals=before, layers=layers)
        replace_file(partial / MANIFEST_FILE, manifest.model_dump_json(indent=2).encode() + b"\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        fsync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report.finish()
    return PreparedResult(folder=folder, manifest=manifest, state="prepared")


def _expert_formats(converted: ConvertedCheckpoint) -> dict[int, str]:
    """The format of every layer whose routed experts were converted."""
    formats = {}
    for layer in converted.expert_layers():
        module = converted.expert_module(layer, 0, "gate")
        if (format := converted.format_of(module)) is not None:
            formats[layer] = format
    if not formats:
        raise UnsupportedError(
            f"{converted.checkpoint.path}: no routed experts were converted, so there is nothing "
            "to prepare"
        )
    return formats


def _total_bytes(converted: ConvertedCheckpoint, formats: dict[int, str]) -> int:
    """Bytes of the portable weights, which those of the prepared ones come close to."""
    return sum(
        converted.checkpoint.tensors[name].size_bytes
        for layer, format in formats.items()
        for expert in range(converted.moe.experts)
        for projection in PROJECTIONS
        for name in converted.tensor_names(
            converted.expert_module(layer, expert, projection), format
        )
    )


def _fits(folder: Path, converted: ConvertedCheckpoint) -> bool:
    """Whether the folder is whole and was made from these very files."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    whole = all(
        (folder / layer.file).is_file() and (folder / layer.file).stat().st_size == layer.bytes
        for layer in manifest.layers.values()
    )
    return whole and manifest.originals == converted.checkpoint.file_state()
