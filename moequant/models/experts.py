"""The experts of a checkpoint, checked to be complete and of the shapes its config promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moequant.errors import CheckpointError
from moequant.models.architecture import PROJECTIONS, ROUTED_EXPERTS, find_architecture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.models.architecture import Architecture, MoeConfig, TensorRole


class HasShape(Protocol):
    """What is known of a tensor from its header."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents as stored."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a checkpoint is, read from its config and headers.

    Attributes:
        architecture: the family it belongs to.
        moe: sizes of its expert layers.
        roles: the role of every tensor.
        layers: the layers that hold experts, each complete.
    """

    architecture: Architecture
    moe: MoeConfig
    roles: Mapping[str, TensorRole]
    layers: tuple[int, ...]


def read_model(config: Mapping[str, Any], tensors: Mapping[str, HasShape]) -> Model:
    """Say what the tensors of a plain checkpoint are.

    Raises:
        UnsupportedError: an unknown architecture, or an expert that no rule explains.
        CheckpointError: experts are missing, too many, or not of the shapes config.json promises.
    """
    architecture = find_architecture(config)
    roles = classify_all(architecture, tensors)
    moe = architecture.read_config(config)
    layers = check_complete(architecture, moe, roles)
    check_shapes(moe, roles, tensors)
    return Model(architecture=architecture, moe=moe, roles=roles, layers=layers)


def classify_all(architecture: Architecture, names: Mapping[str, object]) -> dict[str, TensorRole]:
    """The role of every tensor, in the order given.

    Raises:
        UnsupportedError: as `Architecture.classify`.
    """
    return {name: architecture.classify(name) for name in names}


def check_complete(
    architecture: Architecture, moe: MoeConfig, roles: Mapping[str, TensorRole]
) -> tuple[int, ...]:
    """The layers that hold experts, in order; each holds exactly the experts config.json says.

    Raises:
        CheckpointError: an expert weight is missing, is one too many, or stands in a dense layer.
    """
    present = {r.layer for r in roles.values() if r.role == ROUTED_EXPERTS}
    optional = tuple(layer for layer in moe.optional_layers if layer in present)
    layers = moe.sparse_layers + optional
    found = {name for name, role in roles.items() if role.role == ROUTED_EXPERTS}
    expected = (
        architecture.expert_tensor(layer, expert, projection)
        for layer in layers
        for expert in range(moe.experts)
        for projection in PROJECTIONS
    )
    # Lazily, for config.json may promise more experts than memory can name.
    missing = next((name for name in expected if name not in found), None)
    if missing is not None:
        raise _incomplete(missing, "missing", moe)
    if len(found) != len(layers) * moe.experts * len(PROJECTIONS):
        surplus = (n for n, r in roles.items() if n in found and not _belongs(r, layers, moe))
        raise _incomplete(next(surplus), "not expected", moe)
    if not layers:
        raise CheckpointError("config.json: no layer of this checkpoint holds experts")
    return layers


def _belongs(role: TensorRole, layers: tuple[int, ...], moe: MoeConfig) -> bool:
    return role.layer in layers and role.expert is not None and role.expert < moe.experts


def _incomplete(name: str, problem: str, moe: MoeConfig) -> CheckpointError:
    return CheckpointError(
        f"{name}: {problem}; config.json says {moe.experts} experts in {len(moe.sparse_layers)} of "
        f"{moe.layers} layers. Fetch the checkpoint again, or correct its config.json"
    )


def check_shapes(
    moe: MoeConfig, roles: Mapping[str, TensorRole], tensors: Mapping[str, HasShape]
) -> None:
    """Refuse an expert weight that is not [N, K] as config.json has it.

    Raises:
        CheckpointError: names the tensor, the shape found and the shape wanted.
    """
    for name, role in roles.items():
        if role.projection is None:
            continue
        wanted = moe.shape(role.projection)
        if tuple(tensors[name].shape) != wanted:
            raise CheckpointError(
                f"{name}: shape {list(tensors[name].shape)}, but a {role.projection} projection is "
                f"{list(wanted)} by config.json"
            )
