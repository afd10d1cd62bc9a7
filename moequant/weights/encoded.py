"""Weights that a source holds in a quantized form: what is known of them from headers.

They are read as they are stored, and decoded by whoever wants numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.dialects import Dialect
    from moequant.models import Place
    from moequant.storage.headers import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedInfo:
    """What is known of a weight [N, K] that several tensors hold: codes, scales and the like.

    Attributes:
        name: what the weight is called once it is decoded, `module.weight`.
        shape: N and K.
        format: name of what its numbers are in.
        dialect: whose names and encoding it is in.
        places: where each of its tensors lies, by the name the dialect has for it.
        parts: those tensors on disk; of a stack, the tensors that hold all experts.
        size_bytes: what it alone takes in the file.
    """

    name: str
    shape: tuple[int, int]
    format: str
    dialect: Dialect
    places: Mapping[str, Place]
    parts: tuple[TensorInfo, ...]
    size_bytes: int

    @property
    def dtype(self) -> str:
        """What it is decoded to, a safetensors name: float32 rounds no format that we read."""
        return "F32"

    @property
    def module(self) -> str:
        """Its name without `.weight`."""
        return self.name.removesuffix(".weight")
