"""The sizes of expert layers, and the function between their GEMMs, from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moequant.act_fn import ActFn

PROJECTIONS = ("gate", "up", "down")
"""The projections of an expert, in this order; `gate` exists only in gated experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The sizes of a checkpoint's expert layers, from its config.json.

    Attributes:
        experts: routed experts per layer (E).
        top_k: experts per token (T).
        hidden: hidden size (H); gate and up are [I, H], down is [H, I].
        intermediate: intermediate size of one expert (I).
        layers: number of layers, without multi-token-prediction (MTP) layers.
        sparse_layers: indices of the layers with experts.
        optional_layers: MTP layers with experts, which a checkpoint may omit.
        act_fn: the function between the GEMMs, of all layers but the next.
        limited: layers with experts that clamp, each with its function, in order; most models have
            none.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    layers: int
    sparse_layers: tuple[int, ...]
    optional_layers: tuple[int, ...]
    act_fn: ActFn
    limited: tuple[tuple[int, ActFn], ...] = ()

    def act_fn_of(self, layer: int) -> ActFn:
        """The function between the GEMMs of a layer."""
        return dict(self.limited).get(layer, self.act_fn)

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections of an expert: gate, up and down, or up and down."""
        return PROJECTIONS if self.act_fn.gated else PROJECTIONS[1:]

    def shape(self, projection: str) -> tuple[int, int]:
        """[N, K] of one expert's projection."""
        if projection == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden

    def whereabouts(self, layer: int) -> str:
        """Where work on a layer is, for people, who count from one: "layer 3/48"."""
        # Layers for multi-token prediction follow the last one.
        return f"layer {layer + 1}/{max(self.layers, layer + 1)}"
