"""A converted checkpoint as any stranger would read it: from disk, through its dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant.checkpoint.source import Checkpoint
from moequant.dialects import find_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import find_architecture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
        format_of: the format config.json gives a module, or None where it was kept.
    """

    checkpoint: Checkpoint
    dialect: Dialect
    architecture: Architecture
    moe: MoeConfig
    format_of: Callable[[str], str | None]

    @classmethod
    def open(cls, path: Path) -> ConvertedCheckpoint:
        """Read config and headers.

        Raises:
            CheckpointError: not a checkpoint, or one without a `quantization_config`.
            UnsupportedError: an architecture or a quantization we do not know.
        """
        checkpoint = Checkpoint.open(path)
        architecture = find_architecture(checkpoint.config)
        quantization_config = _quantization_config(checkpoint)
        dialect = find_dialect(quantization_config)
        return cls(
            checkpoint=checkpoint,
            dialect=dialect,
            architecture=architecture,
            moe=architecture.read_config(checkpoint.config),
            format_of=dialect.reader(quantization_config),
        )

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """The entry of config.json."""
        return _quantization_config(self.checkpoint)

    def expert_layers(self) -> tuple[int, ...]:
        """Layers that hold experts; multi-token-prediction layers only if they are there."""
        modules = {name.rpartition(".")[0] for name in self.checkpoint.tensors}
        present = (
            layer
            for layer in self.moe.optional_layers
            if self.expert_module(layer, 0, "gate") in modules
        )
        return (*self.moe.sparse_layers, *present)

    def expert_module(self, layer: int, expert: int, projection: str) -> str:
        """The module of one expert's gate, up or down."""
        return self.architecture.expert_tensor(layer, expert, projection).removesuffix(".weight")

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
        module = self.expert_module(layer, expert, projection)
        q = self.read(module)
        if tuple(q.shape) != self.moe.shape(projection):
            raise CheckpointError(
                f"{module}: holds {list(q.shape)}, but config.json makes a {projection} projection "
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
