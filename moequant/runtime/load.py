"""load_experts(): the experts of one layer of a converted checkpoint, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import stack
from moequant.models import PROJECTIONS
from moequant.preparation import PreparedCheckpoint, is_prepared_folder
from moequant.runtime.experts import FusedExperts
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.formats import QuantizedWeight

ACTIVATIONS = ("silu",)
"""Values of config.json's `hidden_act` that the runtime computes."""


def load_experts(
    path: str | Path,
    layer: int,
    *,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    activations: Literal["format", "none"] = "format",
    experts: Sequence[int] | None = None,
) -> FusedExperts:
    """Load the routed experts of one layer.

    Args:
        path: a converted checkpoint, or a folder that `moequant prepare` wrote in one.
        layer: index of the layer.
        device: where to put them.
        backend: name of a backend; by default the best that can run them there.
        activations: "format" quantizes activations as the format's GEMM does, "none" never does.
        experts: load only these, as one rank of an expert-parallel group does; the result then
            takes global ids and contributes nothing for the other experts.

    Raises:
        CheckpointError: not a converted checkpoint, a damaged one, no such layer, or a prepared
            folder that is stale.
        UnsupportedError: the layer was not converted, its activation is not one we compute, or no
            backend runs it there.
    """
    folder = Path(path)
    prepared = PreparedCheckpoint.open(folder) if is_prepared_folder(folder) else None
    converted = prepared.converted if prepared else ConvertedCheckpoint.open(folder)
    _check(converted, layer)
    everything = range(converted.moe.experts)
    chosen = list(everything if experts is None else experts)
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(everything):
        raise UnsupportedError(
            f"experts {chosen}: wanted is at least one, all different, from 0 to "
            f"{converted.moe.experts - 1}"
        )
    if prepared:
        weights = [_take(q, chosen) for q in prepared.read_layer(layer)]
    else:
        weights = [_read(converted, layer, chosen, projection) for projection in PROJECTIONS]
    gate, up, down = (q.to(device) for q in weights)
    expert_map = None
    if experts is not None:
        expert_map = torch.full((converted.moe.experts,), -1, dtype=torch.int32, device=device)
        expert_map[chosen] = torch.arange(len(chosen), dtype=torch.int32, device=device)
    return FusedExperts(
        ExpertWeights(gate=gate, up=up, down=down),
        backend=backend,
        activations=activations,
        expert_map=expert_map,
    )


def _check(converted: ConvertedCheckpoint, layer: int) -> None:
    layers = converted.expert_layers()
    if layer not in layers:
        raise CheckpointError(
            f"{converted.checkpoint.path}: layer {layer} holds no experts; layers that do: "
            f"{', '.join(map(str, layers))}"
        )
    if converted.moe.activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"config.json: activation {converted.moe.activation!r}, but the runtime computes "
            f"{', '.join(ACTIVATIONS)}"
        )


def _read(
    converted: ConvertedCheckpoint, layer: int, experts: Sequence[int], projection: str
) -> QuantizedWeight:
    return stack([converted.read_expert(layer, expert, projection) for expert in experts])


def _take(q: QuantizedWeight, experts: Sequence[int]) -> QuantizedWeight:
    return stack([q[expert] for expert in experts])
