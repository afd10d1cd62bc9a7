"""Experts of a folder that `moequant prepare` wrote, read as a backend wants them.

vLLM still walks over the portable files, for all other tensors; what it gives of the experts is
checked and counted, and not read. The reader, which holds a pinned buffer, is shared by the layers
that are not loaded yet.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm.config import get_current_vllm_config

from moequant.errors import CheckpointError, UnsupportedError
from moequant.integrations.vllm.name import NAME
from moequant.runtime.load import open_reader
from moequant.storage.files import PREPARED_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch
    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.integrations.vllm.stored import RankSizes
    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.backends import PackedExperts
    from moequant.runtime.layer_reader import LayerReader

_OPTION = f"the option prepared of {NAME}"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_readers: WeakValueDictionary[tuple[Path, torch.device], LayerReader] = WeakValueDictionary()


class PreparedExperts:
    """The experts of one layer in a prepared folder.

    Args:
        name: of the layer in vLLM.
        target: name of the folder, as of `moequant prepare --target`.
        sizes: of the layer's experts on this rank.
        device: where they shall be.

    Raises:
        CheckpointError: there is no such folder in the model's, or it does not fit.
        UnsupportedError: a rank's part of experts, or a layer that is not one of the model's own.
    """

    def __init__(self, name: str, target: str, sizes: RankSizes, device: torch.device) -> None:
        found = _LAYER.search(name)
        if found is None or "mtp" in name.split("."):
            raise UnsupportedError(
                f"{name}: {_OPTION} is for the layers of the model itself; leave it out"
            )
        if sizes.tp_size > 1:
            raise UnsupportedError(
                f"{name}: prepared folders hold whole experts, which tensor parallel "
                f"{sizes.tp_size} cuts; add --enable-expert-parallel, or leave out {_OPTION}"
            )
        self._name, self._layer = name, int(found[1])
        self._reader = _reader(_folder(name, target), device)

    def load(
        self,
        expert_map: Tensor | None,
        act_fn: ActFn,
        *,
        backend: str | None,
        activations: ActivationsChoice,
    ) -> PackedExperts:
        """The experts of this rank, as they are in the file of the layer.

        Args:
            expert_map: [global experts] index here or -1; None for all experts.
            act_fn: what vLLM computes between the GEMMs.
            backend: as for `FusedExperts`.
            activations: likewise.

        Raises:
            CheckpointError: the folder lacks the layer, or is damaged or stale.
            UnsupportedError: no backend runs the experts, or their function is another.
        """
        experts = list(range(self._reader.converted.moe.experts))
        if expert_map is not None:
            places = expert_map.tolist()
            experts = sorted((e for e in experts if places[e] >= 0), key=places.__getitem__)
        packed = self._reader.load(self._layer, experts, backend=backend, activations=activations)
        if packed.workload.act_fn != act_fn:
            raise UnsupportedError(
                f"{self._name}: prepared with {packed.workload.act_fn} between the GEMMs, but vLLM "
                f"computes {act_fn}; leave out {_OPTION}"
            )
        return packed


def keeping_nothing(layer: Any, weight_loader: Callable[..., object]) -> Callable[..., bool]:
    """In place of vLLM's loader: says what is this rank's, and copies nothing.

    Args:
        layer: a `RoutedExperts` of vLLM.
        weight_loader: vLLM's, whose attributes models read.
    """

    def load(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool:
        if expert_id is None:
            return True
        local: int = layer._map_global_expert_id_to_local_expert_id(expert_id)
        return local != -1

    vars(load).update(vars(weight_loader))
    return load


def model_folder() -> str:
    """What vLLM loads: a folder, or an id of a hub.

    Of a draft model it is the draft's own, as vLLM builds that with a configuration of its own
    (v1/spec_decode/draft_model.py: `_create_draft_vllm_config`). Heads for speculation have the
    configuration of the model, but numbers of layers behind the model's.
    """
    folder: str = get_current_vllm_config().model_config.model
    return folder


def _folder(name: str, target: str) -> Path:
    model = Path(model_folder())
    folder = model / PREPARED_FOLDER / target
    if not model.is_dir():
        raise CheckpointError(
            f"{name}: {_OPTION} is {target!r}, but {str(model)!r} is no local folder; download the "
            "checkpoint, prepare it and serve its folder, or leave the option out"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{name}: {_OPTION} is {target!r}, but there is no {folder}; run moequant prepare "
            f"{model} --target {target}, or leave the option out"
        )
    return folder


def _reader(folder: Path, device: torch.device) -> LayerReader:
    found = _readers.get((folder, device))
    if found is None:
        found = _readers[folder, device] = open_reader(folder, device)
    return found
