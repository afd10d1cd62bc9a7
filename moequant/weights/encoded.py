"""Quantized weights on disk: where their tensors lie, and how these are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.weights.places import locate, pick, read_places

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.dialects import Dialect
    from moequant.formats import QuantizedWeight
    from moequant.models import Place
    from moequant.storage.checkpoint import Checkpoint, TensorRange
    from moequant.storage.headers import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """A weight that several tensors hold: codes, scales and the like.

    Attributes:
        module: its name without `.weight`.
        format: name of what its numbers are in.
        dialect: whose names and encoding it is in.
        places: where each of its tensors lies, by the name the dialect has for it.
    """

    module: str
    format: str
    dialect: Dialect
    places: Mapping[str, Place]

    @property
    def name(self) -> str:
        """What the weight is called once it is decoded."""
        return f"{self.module}.weight"

    def locate(self, checkpoint: Checkpoint) -> dict[str, TensorRange]:
        """The bytes to read, by the dialect's names; errors as `read_places` and `decode`."""
        if not self.places:
            self.decode({})  # which says what is missing
        return {name: locate(checkpoint, place) for name, place in self.places.items()}

    def pick(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is this weight's of the tensors that were read where `locate` says."""
        return {name: pick(read[name], place) for name, place in self.places.items()}

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight, of what lies at each of its places, on any device.

        Raises:
            CheckpointError: a tensor is missing, or codes and scales do not fit each other.
            UnsupportedError: a scale with values that the format's scale dtype cannot hold.
        """
        return self.dialect.from_disk(self.module, self.format, tensors)

    def read(self, checkpoint: Checkpoint) -> QuantizedWeight:
        """Locate, read and decode; errors as `read_places` and `decode`."""
        found = read_places(checkpoint, [*self.places.values()])
        return self.decode(dict(zip(self.places, found, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedInfo(EncodedWeight):
    """What is known of a quantized weight [N, K] of a source from headers.

    Attributes:
        shape: N and K.
        parts: its tensors on disk; of a stack, the tensors that hold all experts.
        size_bytes: what it alone takes in the file.
    """

    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]
    size_bytes: int

    @property
    def dtype(self) -> str:
        """What it is decoded to, a safetensors name: float32 rounds no format that we read."""
        return "F32"
