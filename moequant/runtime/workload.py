"""What a backend is asked to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.act_fn import SILU, ActFn

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The description of a layer to run.

    Attributes:
        format: name of the format of the weights.
        activations: a scheme of `moequant.runtime.activations`, where `FusedExperts` has "format",
            for the scheme that the format has, or "none".
        experts: E, on this device.
        hidden: H.
        intermediate: I.
        device: where weights and activations are.
        act_fn: the function between the GEMMs.
        bias: whether any projection has one.
    """

    format: str
    activations: str
    experts: int
    hidden: int
    intermediate: int
    device: torch.device
    act_fn: ActFn = SILU
    bias: bool = False
