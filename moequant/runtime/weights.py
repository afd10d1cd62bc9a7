"""The weights of a layer's experts, checked to fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import check_parts

if TYPE_CHECKING:
    import torch

    from moequant.formats import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Gate, up and down projections of E experts, in one format and row-major as on disk.

    Attributes:
        gate: [E, I, H], also called w1.
        up: [E, I, H], also called w3.
        down: [E, H, I], also called w2.

    Raises:
        CheckpointError: shapes that contradict each other, or parts that are not what the format
            makes of a weight of that shape.
        UnsupportedError: the three differ in format or device, or no format is called that.
    """

    gate: QuantizedWeight
    up: QuantizedWeight
    down: QuantizedWeight

    def __post_init__(self) -> None:
        _check_same_format(self.projections())
        _check_shapes(self.projections())
        for name, q in self.projections().items():
            check_parts(q.tensors(), q.format, q.shape, name)
        _check_same_device(self.projections())

    def projections(self) -> dict[str, QuantizedWeight]:
        """The three weights by name."""
        return {"gate": self.gate, "up": self.up, "down": self.down}

    @property
    def format(self) -> str:
        """Name of the format of all three."""
        return self.gate.format

    @property
    def experts(self) -> int:
        """E, the number of experts here."""
        return self.gate.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.gate.shape[2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.gate.shape[1]

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return self.gate.qdata.device


def _check_same_format(weights: dict[str, QuantizedWeight]) -> None:
    formats = {name: q.format for name, q in weights.items()}
    if len(set(formats.values())) > 1:
        found = ", ".join(f"{name} {format}" for name, format in formats.items())
        raise UnsupportedError(
            f"the projections of a layer share one format, but here: {found}; "
            "convert all three by one rule"
        )


def _check_shapes(weights: dict[str, QuantizedWeight]) -> None:
    shape = list(weights["gate"].shape)
    if len(shape) != 3 or 0 in shape[1:]:
        raise CheckpointError(f"gate is {shape}, but experts are [E, I, H] with I and H at least 1")
    experts, intermediate, hidden = shape
    for name, wanted in (("up", shape), ("down", [experts, hidden, intermediate])):
        if list(weights[name].shape) != wanted:
            raise CheckpointError(
                f"{name} is {list(weights[name].shape)}, but gate is {shape}, so {name} must be "
                f"{wanted}"
            )


def _check_same_device(weights: dict[str, QuantizedWeight]) -> None:
    devices = {
        f"{name}.{part}": tensor.device
        for name, q in weights.items()
        for part, tensor in q.tensors().items()
    }
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedError(f"the weights of a layer share one device, but here: {found}")
