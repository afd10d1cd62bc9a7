"""The experts of a checkpoint, checked for completeness and for the shapes in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moequant.errors import CheckpointError, UnsupportedError
from moequant.models.architecture import EXPERT_BIAS, ROUTED_EXPERTS, TensorRole
from moequant.models.table import find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.models.architecture import Architecture
    from moequant.models.moe_config import MoeConfig
    from moequant.models.stacked import Place, StackedExperts


class HasShape(Protocol):
    """A tensor's entry in the header."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint's architecture, sizes and tensor roles, from its config.json and headers.

    Attributes:
        architecture: the family it belongs to.
        moe: sizes of its expert layers.
        roles: the role of every tensor. In place of a stacked tensor there is an entry for each
            weight in it, under the name that the converted weight gets.
        layers: the layers with experts, each complete.
        places: where each stacked weight lies, by name, in storage order.
    """

    architecture: Architecture
    moe: MoeConfig
    roles: Mapping[str, TensorRole]
    layers: tuple[int, ...]
    places: Mapping[str, Place]


def read_model(
    config: Mapping[str, Any],
    tensors: Mapping[str, HasShape],
    own: Sequence[Architecture] = (),
) -> Model:
    """Find the role of every tensor of a plain checkpoint, and check its experts.

    Args:
        config: the checkpoint's config.json.
        tensors: the entries of its headers, by name.
        own: architectures from a user's file or a record, used instead of the table.

    Raises:
        UnsupportedError: an unknown architecture, an expert that matches no pattern, or a stack
            that fits two orientations while the description names neither.
        CheckpointError: experts are missing, unexpected, or not of the shapes in config.json.
    """
    architecture = find_architecture(config, own, names=tensors)
    roles = classify_all(architecture, tensors)
    moe = architecture.read_config(config)
    places: dict[str, Place] = {}
    if architecture.stacked is not None:
        transposed = _check_stacks(architecture, architecture.stacked, moe, roles, tensors)
        roles, places = _unstack(architecture, architecture.stacked, moe, roles, transposed)
    layers = check_complete(architecture, moe, roles)
    if architecture.stacked is not None and architecture.stacked.biased:
        _check_biases(architecture, architecture.stacked, moe, layers, roles, tensors)
    check_shapes(
        architecture, moe, roles, {name: info for name, info in tensors.items() if name in roles}
    )
    return Model(architecture=architecture, moe=moe, roles=roles, layers=layers, places=places)


def _unstack(
    architecture: Architecture,
    stacked: StackedExperts,
    moe: MoeConfig,
    roles: Mapping[str, TensorRole],
    transposed: Mapping[str, bool],
) -> tuple[dict[str, TensorRole], dict[str, Place]]:
    """Roles with each stack replaced by its weights, and where those weights lie.

    Raises:
        CheckpointError: an expert exists twice, in a stack and as a tensor of its own.
    """
    unstacked: dict[str, TensorRole] = {}
    places: dict[str, Place] = {}
    for name, role in roles.items():
        if role.role != ROUTED_EXPERTS or role.expert is not None:
            unstacked[name] = role
            continue
        assert role.layer is not None, name
        for expert, projection in _members(stacked, moe, role):
            weight = architecture.expert_tensor(role.layer, expert, projection)
            if weight in roles:
                raise CheckpointError(
                    f"{weight}: {name} holds this expert as well; remove one of the two"
                )
            unstacked[weight] = TensorRole(
                role=ROUTED_EXPERTS, layer=role.layer, expert=expert, projection=projection
            )
            places[weight] = stacked.place(
                role.layer, expert, projection, moe, transposed=transposed[name]
            )
    return unstacked, places


def _members(
    stacked: StackedExperts, moe: MoeConfig, role: TensorRole
) -> Iterator[tuple[int, str]]:
    """Expert and projection of every weight in a stack."""
    for expert in range(moe.experts):
        for projection in moe.projections:
            if stacked.stack_of(projection) == role.projection:
                yield expert, projection


def _check_stacks(
    architecture: Architecture,
    stacked: StackedExperts,
    moe: MoeConfig,
    roles: Mapping[str, TensorRole],
    tensors: Mapping[str, HasShape],
) -> dict[str, bool]:
    """Check that every stack has the shape and layer that config.json gives, and none is missing.

    Returns:
        Whether each stack is transposed, by tensor name.

    Raises:
        CheckpointError: names the tensor.
        UnsupportedError: as `_is_transposed`.
    """
    transposed: dict[str, bool] = {}
    layers = {*moe.sparse_layers, *moe.optional_layers}
    for name, role in roles.items():
        if role.role != ROUTED_EXPERTS or role.expert is not None:
            continue
        assert role.layer is not None, name
        assert role.projection is not None, name
        if role.layer not in layers:
            raise _surplus(name, architecture, moe)
        shape = tuple(tensors[name].shape)
        transposed[name] = _is_transposed(architecture, stacked, moe, name, role.projection, shape)
        for stack in stacked.tensors:
            if (other := stacked.tensor(role.layer, stack)) not in tensors:
                raise _missing(other, architecture, moe)
    return transposed


def _is_transposed(
    architecture: Architecture,
    stacked: StackedExperts,
    moe: MoeConfig,
    name: str,
    stack: str,
    shape: tuple[int, ...],
) -> bool:
    """Whether a stack is transposed: as the description says, else as its shape tells.

    Raises:
        CheckpointError: its shape does not fit the sizes in config.json.
        UnsupportedError: it fits both orientations, and the description names neither.
    """
    shapes = {t: stacked.shape(stack, moe, transposed=t) for t in (False, True)}
    fitting = [t for t, wanted in shapes.items() if shape == wanted]
    declared = stacked.transposed(stack)
    if declared is None:
        if len(fitting) == 2:
            raise UnsupportedError(
                f"{name}: shape {list(shape)} fits both orientations, [N, K] and [K, N], because "
                "N equals K in config.json. Set `stacked.transposed` in "
                f"{architecture.origin}: true if the model computes x @ w, false if it computes "
                "x @ w.T"
            )
        if fitting:
            return fitting[0]
        raise CheckpointError(
            f"{name}: shape {list(shape)}, but by config.json all experts of a layer are "
            f"{list(shapes[False])}, or {list(shapes[True])} if transposed; "
            f"{architecture.how_to_fix('`stacked` or a key under `config`')}"
        )
    if declared not in fitting:
        found = f" (that is {_ORIENTATION[not declared]})" if fitting else ""
        raise CheckpointError(
            f"{name}: shape {list(shape)}{found}, but by config.json all experts of a layer are "
            f"{list(shapes[declared])} ({_ORIENTATION[declared]}); fetch the checkpoint again, or "
            f"{architecture.how_to_fix('`stacked.transposed` or a key under `config`')}"
        )
    return declared


_ORIENTATION = {True: "transposed, [K, N]", False: "[N, K]"}


def _check_biases(
    architecture: Architecture,
    stacked: StackedExperts,
    moe: MoeConfig,
    layers: Iterable[int],
    roles: Mapping[str, TensorRole],
    tensors: Mapping[str, HasShape],
) -> None:
    """Check that every layer with experts has biases of the right shape, and no other layer has.

    Raises:
        CheckpointError: names the tensor.
    """
    wanted = {
        stacked.bias(layer, stack): stacked.bias_shape(stack, moe)
        for layer in layers
        for stack in stacked.tensors
    }
    for name, shape in wanted.items():
        if name not in tensors:
            raise _missing(name, architecture, moe)
        _check_shape_of_all(name, tensors[name], shape)
    for name, role in roles.items():
        if role.role == EXPERT_BIAS and name not in wanted:
            raise _surplus(name, architecture, moe)


def _check_shape_of_all(name: str, info: HasShape, wanted: tuple[int, ...]) -> None:
    if tuple(info.shape) != wanted:
        raise CheckpointError(
            f"{name}: shape {list(info.shape)}, but by config.json the biases of all experts of a "
            f"layer are {list(wanted)}; fetch the checkpoint again"
        )


def classify_all(architecture: Architecture, names: Mapping[str, object]) -> dict[str, TensorRole]:
    """The role of every tensor, in the order given.

    Raises:
        UnsupportedError: as `Architecture.classify`.
    """
    return {name: architecture.classify(name) for name in names}


def check_complete(
    architecture: Architecture, moe: MoeConfig, roles: Mapping[str, TensorRole]
) -> tuple[int, ...]:
    """The layers with experts, in order, each checked to hold the experts that config.json says.

    `roles` has an entry for every single expert weight, also for stacked ones.

    Raises:
        CheckpointError: an expert weight is missing or unexpected, or lies in a dense layer.
    """
    present = {r.layer for r in roles.values() if r.role == ROUTED_EXPERTS}
    optional = tuple(layer for layer in moe.optional_layers if layer in present)
    layers = moe.sparse_layers + optional
    experts = {n: role for n, role in roles.items() if role.role == ROUTED_EXPERTS}
    found = {(role.layer, role.expert, role.projection) for role in experts.values()}
    # A generator, because config.json may claim more experts than fit in memory.
    expected = (
        (layer, expert, projection)
        for layer in layers
        for expert in range(moe.experts)
        for projection in moe.projections
    )
    missing = next((one for one in expected if one not in found), None)
    if missing is not None:
        layer, _, projection = missing
        name = architecture.expert_tensor(*missing)
        if architecture.stacked is not None and layer not in present:
            name = architecture.stacked.tensor(layer, projection)
        raise _missing(name, architecture, moe)
    if len(experts) != len(layers) * moe.experts * len(moe.projections):
        surplus = (n for n, r in experts.items() if not _belongs(r, layers, moe))
        raise _surplus(next(surplus), architecture, moe)
    if not layers:
        raise CheckpointError(
            "config.json: no layer has experts; moequant converts mixture-of-experts checkpoints"
        )
    return layers


def _belongs(role: TensorRole, layers: tuple[int, ...], moe: MoeConfig) -> bool:
    return role.layer in layers and role.expert is not None and role.expert < moe.experts


def _missing(name: str, architecture: Architecture, moe: MoeConfig) -> CheckpointError:
    return CheckpointError(
        f"{name}: missing; {_expected_experts(moe)}. Fetch the checkpoint again, or correct its "
        "config.json; "
        + architecture.how_to_fix("`experts` or `stacked`", "the tensor has another name there")
    )


def _surplus(name: str, architecture: Architecture, moe: MoeConfig) -> CheckpointError:
    return CheckpointError(
        f"{name}: not expected; {_expected_experts(moe)}. Fetch the checkpoint again, or correct "
        "its config.json; "
        + architecture.how_to_fix(
            "`config.experts` or `sparse`", "the number of experts is read from the wrong key"
        )
    )


def _expected_experts(moe: MoeConfig) -> str:
    return (
        f"config.json says {moe.experts} experts in {len(moe.sparse_layers)} of {moe.layers} layers"
    )


def check_shapes(
    architecture: Architecture,
    moe: MoeConfig,
    roles: Mapping[str, TensorRole],
    tensors: Mapping[str, HasShape],
) -> None:
    """Check that every expert weight has the shape [N, K] that config.json gives.

    Raises:
        CheckpointError: names the tensor, the shape found and the shape wanted.
    """
    for name, info in tensors.items():
        role = roles[name]
        if role.projection is None or role.expert is None:
            continue
        wanted = moe.shape(role.projection)
        if tuple(info.shape) != wanted:
            raise CheckpointError(
                f"{name}: shape {list(info.shape)}, but config.json gives the {role.projection} "
                f"projection of an expert the shape {list(wanted)}; fetch the checkpoint again, or "
                f"{architecture.how_to_fix('`projections` or a key under `config`')}"
            )


def biases_of(names: Iterable[str], roles: Mapping[str, TensorRole]) -> set[str]:
    """Tensors with the biases of the layers in which experts called `names` are."""
    layers = {roles[name].layer for name in names if roles[name].role == ROUTED_EXPERTS}
    return {n for n, role in roles.items() if role.role == EXPERT_BIAS and role.layer in layers}
