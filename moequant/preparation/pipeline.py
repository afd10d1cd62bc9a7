"""prepare(), which `moequant prepare` calls."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moequant._version import __version__
from moequant.conversion import DEFAULT_WORKERS
from moequant.errors import CheckpointError, MoequantError
from moequant.formats import get_format
from moequant.preparation.layers import check_target, layouts_of_layer, write_layer
from moequant.progress import SilentProgress
from moequant.quantizers.worker_pool import worker_pool
from moequant.runtime.layer_reader import computed_act_fn
from moequant.runtime.packing import check_activations
from moequant.runtime.prepared_manifest import (
    Manifest,
    check_no_link,
    is_prepared_file,
    read_manifest,
)
from moequant.storage.disk import explained, fsync_directory, replace_file
from moequant.storage.files import MANIFEST_FILE, PREPARED_FOLDER
from moequant.storage.folder import entries, searched
from moequant.storage.given_path import given_path
from moequant.storage.lock import exclusive
from moequant.storage.reader import FixedFile
from moequant.weights.converted import ConvertedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.backends import Layout


@dataclass(frozen=True, kw_only=True)
class PreparationResult:
    """What `prepare` did.

    Attributes:
        folder: where the kernel-ready tensors lie.
        manifest: what the folder says of itself.
        state: "prepared" or "already prepared".
        replaced: what the folder said of itself before, if it was replaced and its manifest could
            be read.
    """

    folder: Path
    manifest: Manifest
    state: Literal["prepared", "already prepared"]
    replaced: Manifest | None = None


def prepare(
    converted: str | Path,
    *,
    target: str,
    activations: ActivationsChoice = "format",
    overwrite: bool = False,
    architecture: str | Path | None = None,
    progress: Progress | None = None,
) -> PreparationResult:
    """Write kernel-ready tensors of a converted checkpoint to its folder moequant-prepared/TARGET.

    The portable files stay as they are. A target has one folder: one made for other activations,
    from other originals, or by another version of a layout, is replaced. It holds nothing that
    cannot be made again.

    Args:
        converted: a converted checkpoint.
        target: "sm90" (Hopper) or "sm100" (Blackwell).
        activations: what `load_experts` will be given: the layout is the one that the best backend
            for such activations reads. With "format", that is what config.json or the format says;
            for nvfp4 and mxfp4 that were converted weight-only, none.
        overwrite: write again even if the folder fits.
        architecture: a TOML file that describes the checkpoint's architecture; needed only where
            neither moequant.json nor our table does.
        progress: receives the progress.

    Raises:
        ArchitectureError: the file `architecture` is none.
        CheckpointError: not a converted checkpoint, a damaged one, or a prepared folder that cannot
            be searched.
        UnsupportedError: no kernel of the target takes the format with these activations, or not in
            this shape.
        MoequantError: the folder cannot be written, or another run is writing it.
    """
    check_target(target)
    check_activations(activations)
    path = given_path("converted", converted)
    checkpoint = ConvertedCheckpoint.open(
        path, architecture=architecture, quantized_activations=True
    )
    layouts = _expert_layouts(checkpoint, target, activations)
    folder = checkpoint.checkpoint.path / PREPARED_FOLDER / target
    with searched(folder):
        _check_replaceable(folder)
    manifest = None if overwrite else _fitting_manifest(folder, checkpoint, target, layouts)
    work = folder.with_name(f".{target}.partial")
    if manifest is not None:
        _remove_left_over(work)
        return PreparationResult(folder=folder, manifest=manifest, state="already prepared")
    _check_no_other_files(folder)
    replaced = None
    with suppress(CheckpointError):
        replaced = read_manifest(folder)
    try:
        with exclusive(work, "preparation"):
            try:
                manifest = _write(work, checkpoint, target, layouts, progress)
                _put_in_place(work, folder)
            finally:
                _remove(work)
    finally:
        # Empty if nothing was ever prepared, as after a full disk; else it cannot be removed.
        with suppress(OSError):
            folder.parent.rmdir()
    return PreparationResult(folder=folder, manifest=manifest, state="prepared", replaced=replaced)


def _expert_layouts(
    converted: ConvertedCheckpoint, target: str, activations: str
) -> dict[int, tuple[Sequence[Layout], str]]:
    """The kernel layouts of layers whose routed experts were converted, and their activations."""
    layouts = {}
    for layer in converted.expert_layers():
        format = converted.format_of_experts(layer)
        if format is not None:
            computed_act_fn(converted, layer)  # refuses a function that is not computed
            layouts[layer] = layouts_of_layer(converted, layer, target, activations)
    if not layouts:
        raise converted.no_converted_experts("there is nothing to prepare")
    return layouts


def _fitting_manifest(
    folder: Path,
    converted: ConvertedCheckpoint,
    target: str,
    layouts: Mapping[int, tuple[Sequence[Layout], str]],
) -> Manifest | None:
    """The folder's manifest, if `prepare` would write this very folder again; reads no weights.

    Of several layouts that a layer may be in, its weights decided, which are the same.
    """
    try:
        manifest = read_manifest(folder)
        files = {n: FixedFile.at(folder / e.file) for n, e in manifest.layers.items()}
    except CheckpointError:
        return None
    made = {n: e.packed_as for n, e in manifest.layers.items()}
    expected = {
        n: [
            (converted.format_of_experts(n), scheme, layout.name, layout.version)
            for layout in candidates
        ]
        for n, (candidates, scheme) in layouts.items()
    }
    written = {n: (e.bytes, e.mtime_ns) for n, e in manifest.layers.items()}
    fits = (
        manifest.target == target
        and made.keys() == expected.keys()
        and all(made[n] in expected[n] for n in made)
        and manifest.originals == converted.checkpoint.file_state()
        and written == {n: (file.size_bytes, file.mtime_ns) for n, file in files.items()}
    )
    return manifest if fits else None


_WRITTEN, _REPLACED = "files", "replaced"
"""In the work folder: the new folder, and where the old one goes."""


def _write(
    work: Path,
    converted: ConvertedCheckpoint,
    target: str,
    layouts: Mapping[int, tuple[Sequence[Layout], str]],
    progress: Progress | None,
) -> Manifest:
    """Write every layer's file, and the manifest, into a folder of `work`."""
    folder = work / _WRITTEN
    with explained(folder, "made"):
        for left_over in (folder, work / _REPLACED):
            if left_over.exists():  # a run was killed
                shutil.rmtree(left_over)
        folder.mkdir()
    report = progress or SilentProgress()
    report.start(f"preparing for {target}", _total_bytes(converted, layouts))
    originals = converted.checkpoint.file_state()
    # Packing takes longer than reading and hashing, and torch's own threads, which wait for each
    # other after every small operation, take three times the CPU time.
    with worker_pool(DEFAULT_WORKERS) as pool:
        written = {
            layer: write_layer(
                converted,
                layer,
                candidates,
                activations=scheme,
                folder=folder,
                progress=report,
                pool=pool,
            )
            for layer, (candidates, scheme) in layouts.items()
        }
    manifest = Manifest(
        schema_version=7,
        moequant=__version__,
        target=target,
        originals=originals,
        layers=written,
    )
    replace_file(folder / MANIFEST_FILE, manifest.model_dump_json(indent=2).encode() + b"\n")
    report.finish()
    return manifest


def _check_replaceable(folder: Path) -> None:
    """Ask, before weights are read, whether what is there is a folder, which alone is replaced."""
    check_no_link(folder)
    if folder.exists() and not folder.is_dir():
        raise MoequantError(
            f"{folder}: exists and is not a folder; remove it and run moequant prepare again"
        )


def _check_no_other_files(folder: Path) -> None:
    """Ask whether replacing the folder would remove files that `prepare` does not write."""
    there = entries(folder) if folder.is_dir() else []
    others = [entry.name for entry in there if not is_prepared_file(entry.name)]
    if others:
        raise MoequantError(
            f"{folder}: would be replaced, but holds files that moequant prepare does not write: "
            f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}; move them elsewhere and "
            "run it again"
        )


def _put_in_place(work: Path, folder: Path) -> None:
    with explained(folder, "replaced"):
        # Moved away and not removed here, so that at no moment there is half of it.
        if folder.exists():
            folder.rename(work / _REPLACED)
        (work / _WRITTEN).rename(folder)
    fsync_directory(folder.parent)


def _remove_left_over(work: Path) -> None:
    """Remove the work folder of a run that was killed when all was in place."""
    if work.exists():
        with suppress(MoequantError), exclusive(work, "preparation"):
            _remove(work)


def _remove(work: Path) -> None:
    """Remove the work folder, the lock last: once it is gone, the folder may be another run's."""
    for left_over in (work / _WRITTEN, work / _REPLACED):
        shutil.rmtree(left_over, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)


def _total_bytes(converted: ConvertedCheckpoint, layers: Iterable[int]) -> int:
    """Bytes of the portable weights, which those of the prepared ones come close to."""
    moe = converted.moe
    return sum(
        moe.experts * spec.size_bytes
        for layer in layers
        for projection in moe.projections
        for spec in get_format(converted.format_of_experts(layer) or "")
        .specs(moe.shape(projection))
        .values()
    )
