"""The checkpoint of a model that is run over data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.storage.checkpoint import Checkpoint
from moequant.weights.converted import described_architectures
from moequant.weights.source_model import read_source, source_config

if TYPE_CHECKING:
    from pathlib import Path

    from moequant.weights.source_model import SourceModel


def open_source(
    path: Path, architecture: str | Path | None = None
) -> tuple[Checkpoint, SourceModel]:
    """Read headers and config.json of a checkpoint, quantized or not, and what its tensors are.

    Args:
        path: its directory.
        architecture: a file that describes the model, instead of its record and the built-in table.

    Raises:
        ArchitectureError: the file, or the record, is invalid.
        CheckpointError: the checkpoint is damaged or incomplete.
        UnsupportedError: as `read_source`.
    """
    checkpoint = Checkpoint.open(path)
    own = described_architectures(path, architecture)
    with checkpoint.naming_config():
        return checkpoint, read_source(checkpoint.tensors, source_config(checkpoint), own)
