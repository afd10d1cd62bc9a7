"""load_experts(): the experts of one layer of a converted checkpoint, ready to run."""

from __future__ import annotations

import os
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
        path: a converted checkpoint, or a folder that `moequant prepare` wrote in one; of either
            only the weights wanted are read.
        layer: index of the layer.
        device: where to put them.
        backend: name of a backend; by default the best that can run them there.
        activations: "format" quantizes activations as the format's GEMM does, "none" never does.
        experts: load only these, as one rank of an expert-parallel group does; the result then
            takes global ids and contributes nothing for the other experts.

    Raises:
        CheckpointError: not a converted checkpoint, a damaged one, no such layer, or a prepared
            folder that is stale or lies elsewhere.
        UnsupportedError: the layer was not converted, its activation is not one we compute, there
            is no such device here, or no backend runs it there.
    """
    place = _device(device)
    # Not Path.expanduser, which fails for an unknown user without naming the path.
    folder = Path(os.path.expanduser(path))  # noqa: PTH111
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
        gate, up, down = prepared.read_layer(layer, chosen)
    else:
        gate, up, down = (_read(converted, layer, chosen, p) for p in PROJECTIONS)
    expert_map = None
    if experts is not None:
        expert_map = torch.full((converted.moe.experts,), -1, dtype=torch.int32, device=place)
        expert_map[chosen] = torch.arange(len(chosen), dtype=torch.int32, device=place)
    return FusedExperts(
        ExpertWeights(gate=gate.to(place), up=up.to(place), down=down.to(place)),
        backend=backend,
        activations=activations,
        expert_map=expert_map,
    )


def _device(device: torch.device | str) -> torch.device:
    """The device, if it is one that this machine and this build of torch have."""
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    # What torch raises depends on the kind of device: for CUDA it is an AssertionError.
    except (AssertionError, ImportError, RuntimeError) as error:
        # Its first sentence: the rest is about torch's dispatcher.
        reason = str(error).split("\n")[0].split(". ")[0]
        raise UnsupportedError(
            f"device {str(device)!r} cannot be used: {reason}; choose one that this machine and "
            'this build of torch have, such as "cpu"'
        ) from error
    return place


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
