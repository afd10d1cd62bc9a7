"""load_experts(): the experts of layers of a converted checkpoint, ready to run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch

from moequant.arguments import whole_number
from moequant.device import usable_device
from moequant.errors import CheckpointError, UnsupportedError
from moequant.runtime.experts import FusedExperts
from moequant.runtime.layer_reader import LayerReader, computed_act_fn
from moequant.runtime.prepared import PreparedCheckpoint
from moequant.storage.folder import is_prepared_folder
from moequant.storage.given_path import given_path
from moequant.weights.converted import ConvertedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from moequant.runtime.activations import ActivationsChoice


@overload
def load_experts(
    checkpoint: str | Path,
    layer: int,
    device: torch.device | str = "cpu",
    *,
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    experts: Sequence[int] | None = None,
    architecture: str | Path | None = None,
) -> FusedExperts: ...


@overload
def load_experts(
    checkpoint: str | Path,
    layer: Iterable[int],
    device: torch.device | str = "cpu",
    *,
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    experts: Sequence[int] | None = None,
    architecture: str | Path | None = None,
) -> dict[int, FusedExperts]: ...


def load_experts(
    checkpoint: str | Path,
    layer: int | Iterable[int],
    device: torch.device | str = "cpu",
    *,
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    experts: Sequence[int] | None = None,
    architecture: str | Path | None = None,
) -> FusedExperts | dict[int, FusedExperts]:
    """Load the routed experts of one layer, or of several.

    Bytes go from the files to the device through a pinned buffer of fixed size; what a dialect or a
    prepared layout permutes is put in order there. The host holds no tensor of a layer.

    Several layers come as a dict. All arguments are checked, and that a backend runs each layer,
    before the first weight is read. To hold one layer at a time, call once for each.

    Args:
        checkpoint: a converted checkpoint, or a folder that `moequant prepare` wrote in one; of
            either only the weights needed are read.
        layer: index of the layer, or of several.
        device: where to put them.
        backend: name of a backend; by default the best that can run them there.
        activations: "format" quantizes activations as the format's GEMM does, and to NVFP4 or MXFP4
            where config.json says so; "none" never does, "fp8_token" to FP8 with a scale per token,
            which makes MXFP4 faster on Hopper; others as `FusedExperts`.
        experts: load only these, as one rank of an expert-parallel group does; the result then
            takes global ids and contributes nothing for the other experts.
        architecture: a TOML file that describes the checkpoint's architecture; needed only where
            neither moequant.json nor our table does.

    Returns:
        The layer, or for several layers each by its index, in the order given.

    Raises:
        ArchitectureError: the file `architecture` is none.
        CheckpointError: not a converted checkpoint, a damaged one, no such layer, or a prepared
            folder that is stale or lies elsewhere.
        UnsupportedError: the layer was not converted, the function between its GEMMs is not one we
            compute, there is no such device here, or no backend runs it there.
    """
    place = usable_device(device)
    reader = open_reader(checkpoint, place, architecture)
    chosen = _choose(reader.converted, experts)
    # Integers of other libraries have __index__, too; so have their arrays.
    one = isinstance(layer, SupportsIndex) and not isinstance(layer, Iterable)
    layers = _indices("layer", layer, [layer] if one else layer)
    _check(reader.converted, layers)
    loaded = {}
    packed = reader.load_each(layers, chosen, backend=backend, activations=activations)
    for number, weights in packed:
        loaded[number] = FusedExperts(
            weights,
            backend=backend,
            activations=reader.choose_activations(number, activations),
            expert_map=None if experts is None else _expert_map(reader.converted, chosen, place),
        )
    return loaded[layers[0]] if one else loaded


def open_reader(
    checkpoint: str | Path,
    device: torch.device,
    architecture: str | Path | None = None,
) -> LayerReader:
    """The reader for the layers of a converted checkpoint, or of a prepared folder in one.

    Args:
        checkpoint: which; activations may be in NVFP4 or MXFP4, see `choose_activations`.
        device: where layers shall be.
        architecture: see `load_experts`.

    Raises:
        ArchitectureError: the file `architecture` is invalid.
        CheckpointError: neither of the two, a prepared folder outside a checkpoint, or a folder
            that cannot be searched.
        UnsupportedError: an unknown architecture or quantization, or `checkpoint` is no path.
    """
    folder = given_path("checkpoint", checkpoint)
    if is_prepared_folder(folder):
        prepared = PreparedCheckpoint.open(
            folder, architecture=architecture, quantized_activations=True
        )
        return LayerReader(prepared.converted, device, prepared=prepared)
    converted = ConvertedCheckpoint.open(
        folder, architecture=architecture, quantized_activations=True
    )
    return LayerReader(converted, device)


def _indices(name: str, given: Any, each: Any) -> list[int]:
    """The whole numbers in `each`, of what is given; texts and bytes hold none."""
    try:
        if isinstance(each, str | bytes | bytearray | memoryview):
            raise TypeError(f"{type(each).__name__} holds no numbers")
        return [whole_number(one) for one in each]
    except TypeError as error:
        raise UnsupportedError(
            f"{name} is {given!r}, but must be a whole number, or several"
        ) from error


def _choose(converted: ConvertedCheckpoint, experts: Sequence[int] | None) -> list[int]:
    everything = range(converted.moe.experts)
    chosen = _indices("experts", experts, everything if experts is None else experts)
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(everything):
        raise UnsupportedError(
            f"experts is {chosen}, but must be one or several, all different, from 0 to "
            f"{converted.moe.experts - 1}"
        )
    return chosen


def _check(converted: ConvertedCheckpoint, layers: Sequence[int]) -> None:
    if len(set(layers)) != len(layers):
        raise UnsupportedError(f"layers {list(layers)}: must be all different")
    for layer in layers:
        if not converted.has_experts(layer):
            raise CheckpointError(
                f"{converted.checkpoint.path}: layer {layer} holds no experts; layers that do: "
                f"{', '.join(map(str, converted.expert_layers()))}"
            )
        computed_act_fn(converted, layer)


def _expert_map(
    converted: ConvertedCheckpoint, experts: Sequence[int], device: torch.device
) -> Tensor:
    """[global experts] int32: the index in `experts` of each, or -1."""
    row_of = {expert: row for row, expert in enumerate(experts)}
    return torch.tensor(
        [row_of.get(expert, -1) for expert in range(converted.moe.experts)],
        dtype=torch.int32,
        device=device,
    )
