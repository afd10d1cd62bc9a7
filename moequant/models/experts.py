"""The experts of a checkpoint, checked to be complete and of the shapes its config promises."""

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
        roles: the role of every tensor; a tensor that stacks experts is not among them, each
            weight in it is, under the name it has once it is converted.
        layers: the layers that hold experts, each complete.
        places: where the weights that are stacked lie, by name, in the order they lie there.
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
    """Say what the tensors of a plain checkpoint are.

    Args:
        config: its config.json.
        tensors: what its headers say.
        own: architectures that a user's file or a record describes.

    Raises:
        UnsupportedError: an unknown architecture, an expert that no rule explains, or a stack that
            fits two orientations of which none is said to be right.
        CheckpointError: experts are missing, too many, or not of the shapes config.json promises.
    """
    architecture = find_architecture(config, own)
    roles = classify_all(architecture, tensors)
    moe = architecture.read_config(config)
    places: dict[str, Place] = {}
    if architecture.stacked is not None:
        turned = _check_stacks(architecture, architecture.stacked, moe, roles, tensors)
        roles, places = _unstack(architecture, architecture.stacked, moe, roles, turned)
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
    turned: Mapping[str, bool],
) -> tuple[dict[str, TensorRole], dict[str, Place]]:
    """Roles with each weight of a stack in its place, and where those weights lie.

    Raises:
        CheckpointError: an expert is there twice, in a stack and on its own.
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
                    f"{weight}: {name} holds this expert too; remove the one that does not belong"
                )
            unstacked[weight] = TensorRole(
                role=ROUTED_EXPERTS, layer=role.layer, expert=expert, projection=projection
            )
            places[weight] = stacked.place(
                role.layer, expert, projection, moe, transposed=turned[name]
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
    """Refuse stacks of other shapes than config.json has it, in other layers, or not all there.

    Returns:
        Whether each stack lies transposed, by its name.

    Raises:
        CheckpointError: names the tensor.
        UnsupportedError: as `_is_transposed`.
    """
    turned: dict[str, bool] = {}
    layers = {*moe.sparse_layers, *moe.optional_layers}
    for name, role in roles.items():
        if role.role != ROUTED_EXPERTS or role.expert is not None:
            continue
        assert role.layer is not None, name
        assert role.projection is not None, name
        if role.layer not in layers:
            raise _surplus(name, architecture, moe)
        shape = tuple(tensors[name].shape)
        turned[name] = _is_transposed(architecture, stacked, moe, name, role.projection, shape)
        for stack in stacked.tensors:
            if (other := stacked.tensor(role.layer, stack)) not in tensors:
                raise _missing(other, architecture, moe)
    return turned


def _is_transposed(
    architecture: Architecture,
    stacked: StackedExperts,
    moe: MoeConfig,
    name: str,
    stack: str,
    shape: tuple[int, ...],
) -> bool:
    """How a stack lies: as the table says, else as the sizes in config.json leave no other way.

    Raises:
        CheckpointError: its shape is none that config.json makes it.
        UnsupportedError: it fits both ways, and the table says neither.
    """
    shapes = {t: stacked.shape(stack, moe, transposed=t) for t in (False, True)}
    fitting = [t for t, wanted in shapes.items() if shape == wanted]
    said = stacked.transposed(stack)
    if said is None:
        if len(fitting) == 2:
            raise UnsupportedError(
                f"{name}: shape {list(shape)} fits two orientations, for by config.json hidden "
                f"size and rows are the same; no shape tells them apart. Say it: "
                f"transposed = true, where the model computes x @ w, or false, where it computes "
                f"x @ w.T, under `stacked` in {architecture.origin}"
            )
        if fitting:
            return fitting[0]
        raise CheckpointError(
            f"{name}: shape {list(shape)}, but of all experts of a layer it is "
            f"{list(shapes[False])} by config.json, or transposed {list(shapes[True])}; "
            f"{architecture.mend('`stacked` or a key under `config`')}"
        )
    if said not in fitting:
        other = "" if not fitting else f", and not {_WAYS[not said]}"
        raise CheckpointError(
            f"{name}: shape {list(shape)}, but of all experts of a layer it is "
            f"{list(shapes[said])} by config.json, {_WAYS[said]}{other}; fetch the checkpoint "
            f"again, or {architecture.mend('`stacked.transposed` or a key under `config`')}"
        )
    return said


_WAYS = {True: "transposed, [K, N]", False: "as [N, K]"}


def _check_biases(
    architecture: Architecture,
    stacked: StackedExperts,
    moe: MoeConfig,
    layers: Iterable[int],
    roles: Mapping[str, TensorRole],
    tensors: Mapping[str, HasShape],
) -> None:
    """Refuse biases of other shapes or layers than those of the experts, and layers without.

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
            f"{name}: shape {list(info.shape)}, but of all experts of a layer it is "
            f"{list(wanted)} by config.json"
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
    """The layers that hold experts, in order; each holds exactly the experts config.json says.

    `roles` has every expert on its own, those of a stack too.

    Raises:
        CheckpointError: an expert weight is missing, is one too many, or stands in a dense layer.
    """
    present = {r.layer for r in roles.values() if r.role == ROUTED_EXPERTS}
    optional = tuple(layer for layer in moe.optional_layers if layer in present)
    layers = moe.sparse_layers + optional
    experts = {n: role for n, role in roles.items() if role.role == ROUTED_EXPERTS}
    found = {(role.layer, role.expert, role.projection) for role in experts.values()}
    # Lazily, for config.json may promise more experts than memory can name.
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
        raise CheckpointError("config.json: no layer of this checkpoint holds experts")
    return layers


def _belongs(role: TensorRole, layers: tuple[int, ...], moe: MoeConfig) -> bool:
    return role.layer in layers and role.expert is not None and role.expert < moe.experts


def _missing(name: str, architecture: Architecture, moe: MoeConfig) -> CheckpointError:
    return CheckpointError(
        f"{name}: missing; {_promise(moe)}. Fetch the checkpoint again, or correct its "
        f"config.json; or, where the release calls it otherwise, "
        f"{architecture.mend('`experts` or `stacked`')}"
    )


def _surplus(name: str, architecture: Architecture, moe: MoeConfig) -> CheckpointError:
    return CheckpointError(
        f"{name}: not expected; {_promise(moe)}. Fetch the checkpoint again, or correct its "
        f"config.json; or, where the release counts otherwise, "
        f"{architecture.mend('`config.experts` or `sparse`')}"
    )


def _promise(moe: MoeConfig) -> str:
    return (
        f"config.json says {moe.experts} experts in {len(moe.sparse_layers)} of {moe.layers} layers"
    )


def check_shapes(
    architecture: Architecture,
    moe: MoeConfig,
    roles: Mapping[str, TensorRole],
    tensors: Mapping[str, HasShape],
) -> None:
    """Refuse an expert weight that is not [N, K] as config.json has it.

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
                f"{name}: shape {list(info.shape)}, but a {role.projection} projection is "
                f"{list(wanted)} by config.json; fetch the checkpoint again, or "
                f"{architecture.mend('`projections` or a key under `config`')}"
            )
