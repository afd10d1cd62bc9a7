"""A converted checkpoint as any stranger would read it: from disk, through its dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant.checkpoint.source import Checkpoint
from moequant.dialects import find_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import find_architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moequant.dialects.base import Dialect
    from moequant.formats import QuantizedWeight
    from moequant.models import Architecture, MoeConfig


@dataclass(frozen=True, kw_only=True)
class ConvertedCheckpoint:
    """A checkpoint with a `quantization_config` we can read.

    Attributes:
        checkpoint: its files.
        dialect: the dialect its config.json is written in.
        architecture: the family it belongs to.
        moe: sizes of its expert layers.
    """

    checkpoint: Checkpoint
    dialect: Dialect
    architecture: Architecture
    moe: MoeConfig

    @classmethod
    def open(cls, path: Path) -> ConvertedCheckpoint:
        """Read config and headers.

        Raises:
            CheckpointError: not a checkpoint, or one without a `quantization_config`.
            UnsupportedError: an architecture or a quantization we do not know.
        """
        checkpoint = Checkpoint.open(path)
        architecture = find_architecture(checkpoint.config)
        return cls(
            checkpoint=checkpoint,
            dialect=find_dialect(_quantization_config(checkpoint)),
            architecture=architecture,
            moe=architecture.read_config(checkpoint.config),
        )

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """The entry of config.json."""
        return _quantization_config(self.checkpoint)

    def format_of(self, module: str) -> str | None:
        """The format config.json gives a module, or None where it was kept."""
        return self.dialect.format_of(module, self.quantization_config)

    def tensor_names(self, module: str, format: str) -> list[str]:
        """The tensors of a converted module that the checkpoint holds."""
        names = (f"{module}.{suffix}" for suffix in self.dialect.suffixes[format])
        return [name for name in names if name in self.checkpoint.tensors]

    def read(self, module: str) -> QuantizedWeight:
        """Read one converted weight.

        Raises:
            CheckpointError: a tensor is missing, or not what the dialect says.
            UnsupportedError: config.json says that the module was kept.
        """
        format = self.format_of(module)
        if format is None:
            raise UnsupportedError(f"{module}: not converted; config.json leaves it as it was")
        tensors = {n: self.checkpoint.read(n) for n in self.tensor_names(module, format)}
        return self.dialect.from_disk(module, format, tensors)

    def read_expert(self, layer: int, expert: int, projection: str) -> QuantizedWeight:
        """Read one expert's gate, up or down, [N, K].

        Raises:
            CheckpointError: as `read`, or the shape is not what config.json says.
            UnsupportedError: as `read`.
        """
        name = self.architecture.expert_tensor(layer, expert, projection)
        q = self.read(name.removesuffix(".weight"))
        if tuple(q.shape) != self.moe.shape(projection):
            raise CheckpointError(
                f"{name}: holds {list(q.shape)}, but config.json makes a {projection} projection "
                f"{list(self.moe.shape(projection))}"
            )
        return q


def _quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: no quantization_config; this is not a converted "
            "checkpoint. Convert it first: moequant convert SOURCE OUTPUT --format NAME"
        )
    return config
