"""The experts of a checkpoint, checked for completeness and for the shapes in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moequant.errors import CheckpointError, UnsupportedError
from moequant.models.architecture import EXPERT_BIAS, ROUTED_EXPERTS, TensorRole
from moequant.models.table import find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

    def whereabouts(self, name: str) -> str:
        """Where work on a tensor or weight is, as of `MoeConfig`; its name if in no layer.

        Parts of a weight that is stored quantized are where the weight is.
        """
        role = self.roles.get(name) or self.roles.get(f"{name.rpartition('.')[0]}.weight")
        return name if role is None or role.layer is None else self.moe.whereabouts(role.layer)


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
        CheckpointError: experts are missing, unexpected, or not of the shapes in config.json; names
            the tensor.
    """
    architecture = find_architecture(config, own, names=tensors)
    roles = {name: architecture.classify(name) for name in tensors}
    experts = _Experts(architecture, architecture.read_config(config), tensors)
    places: dict[str, Place] = {}
    if architecture.stacked is not None:
        roles, places = experts.unstack(architecture.stacked, roles)
    layers = experts.check_complete(roles)
    if architecture.stacked is not None and architecture.stacked.biased:
        experts.check_biases(architecture.stacked, layers, roles)
    experts.check_shapes(roles)
    return Model(
        architecture=architecture, moe=experts.moe, roles=roles, layers=layers, places=places
    )


def check_experts(
    architecture: Architecture,
    moe: MoeConfig,
    roles: Mapping[str, TensorRole],
    tensors: Mapping[str, HasShape],
) -> None:
    """Check that a quantized checkpoint has the experts that config.json says.

    Args:
        architecture: the checkpoint's.
        moe: sizes of its expert layers, by config.json.
        roles: those of its weights, by name. One without a number of an expert stands for all
            stacks of its layer.
        tensors: those that are not quantized, by name.

    Raises:
        CheckpointError: experts are missing or unexpected, or those among `tensors` have other
            shapes; names the tensor.
        UnsupportedError: as `read_model`, of stacks.
    """
    experts = _Experts(architecture, moe, tensors)
    single: dict[str, TensorRole] = {}
    for name, role in roles.items():
        if role.role == ROUTED_EXPERTS and role.expert is None:
            single |= experts.check_stacks(name, role)
        else:
            single[name] = role
    experts.check_complete(single)
    experts.check_shapes(single)


@dataclass(frozen=True)
class _Experts:
    """Checks of the experts in a checkpoint; each raises a CheckpointError."""

    architecture: Architecture
    moe: MoeConfig
    tensors: Mapping[str, HasShape]

    def unstack(
        self, stacked: StackedExperts, roles: Mapping[str, TensorRole]
    ) -> tuple[dict[str, TensorRole], dict[str, Place]]:
        """Roles with each stack replaced by its weights, and where those weights lie.

        Each stack is checked to be of a shape and in a layer that config.json gives, and to be
        there with the others of its layer.
        """
        moe = self.moe
        unstacked: dict[str, TensorRole] = {}
        places: dict[str, Place] = {}
        for name, role in roles.items():
            if role.role != ROUTED_EXPERTS or role.expert is not None:
                unstacked[name] = role
                continue
            assert role.layer is not None, name
            assert role.projection is not None, name
            if role.layer not in {*moe.sparse_layers, *moe.optional_layers}:
                raise self._surplus(name)
            transposed = self._is_transposed(stacked, name, role.projection)
            for stack in stacked.tensors:
                if (other := stacked.tensor(role.layer, stack)) not in self.tensors:
                    raise self._missing(other)
            members = [p for p in moe.projections if stacked.stack_of(p) == role.projection]
            for expert in range(moe.experts):
                for projection in members:
                    weight = self.architecture.expert_tensor(role.layer, expert, projection)
                    if weight in roles:
                        raise CheckpointError(
                            f"{weight}: {name} holds this expert as well; remove one of the two"
                        )
                    unstacked[weight] = TensorRole(
                        role=ROUTED_EXPERTS, layer=role.layer, expert=expert, projection=projection
                    )
                    places[weight] = stacked.place(
                        role.layer, expert, projection, moe, transposed=transposed
                    )
        return unstacked, places

    def _is_transposed(self, stacked: StackedExperts, name: str, stack: str) -> bool:
        """Whether a stack is transposed: as the description says, else as its shape tells."""
        shape = tuple(self.tensors[name].shape)
        shapes = {t: stacked.shape(stack, self.moe, transposed=t) for t in (False, True)}
        possible = stacked.orientations(stack, self.moe, shape)
        if len(possible) == 2:
            raise UnsupportedError(
                f"{name}: shape {list(shape)} fits both orientations, [N, K] and [K, N], because "
                f"N equals K in config.json. Set `stacked.transposed` in "
                f"{self.architecture.origin}: true if the model computes x @ w, false if it "
                "computes x @ w.T"
            )
        if not possible:
            raise CheckpointError(
                f"{name}: shape {list(shape)}, but by config.json all experts of a layer are "
                f"{list(shapes[False])}, or {list(shapes[True])} if transposed; "
                f"{self.architecture.how_to_fix('`stacked` or a key under `config`')}"
            )
        (transposed,) = possible
        if shape != shapes[transposed]:
            other = shape == shapes[not transposed]
            found = f" (that is {_ORIENTATION[not transposed]})" if other else ""
            advice = self.architecture.how_to_fix("`stacked.transposed` or a key under `config`")
            raise CheckpointError(
                f"{name}: shape {list(shape)}{found}, but by config.json all experts of a layer "
                f"are {list(shapes[transposed])} ({_ORIENTATION[transposed]}); fetch the "
                f"checkpoint again, or {advice}"
            )
        return transposed

    def check_complete(self, roles: Mapping[str, TensorRole]) -> tuple[int, ...]:
        """The layers with experts, in order, each with the experts that config.json says."""
        moe, stacked = self.moe, self.architecture.stacked
        experts = {
            (role.layer, role.expert, role.projection)
            for role in roles.values()
            if role.role == ROUTED_EXPERTS
        }
        present = {layer for layer, _, _ in experts}
        layers = (*moe.sparse_layers, *(n for n in moe.optional_layers if n in present))
        # A generator, because config.json may claim more experts than fit in memory.
        expected = (
            (layer, expert, projection)
            for layer in layers
            for expert in range(moe.experts)
            for projection in moe.projections
        )
        for layer, expert, projection in expected:
            if (layer, expert, projection) not in experts:
                if stacked is not None and layer not in present:
                    raise self._missing(stacked.tensor(layer, projection))
                raise self._missing(self.architecture.expert_tensor(layer, expert, projection))
        known = {*layers}
        for name, role in roles.items():
            if role.role == ROUTED_EXPERTS and (
                role.layer not in known or (role.expert or 0) >= moe.experts
            ):
                raise self._surplus(name)
        if not layers:
            raise CheckpointError(
                "config.json: no layer has experts; moequant is for mixture-of-experts checkpoints"
            )
        return layers

    def check_stacks(self, name: str, role: TensorRole) -> dict[str, TensorRole]:
        """The experts of a layer whose stacks are all there, in the shapes of config.json."""
        stacked, moe, layer = self.architecture.stacked, self.moe, role.layer
        assert stacked is not None, name
        assert layer is not None, name
        if layer not in {*moe.sparse_layers, *moe.optional_layers}:
            raise self._surplus(name)
        for stack in stacked.tensors:
            if (tensor := stacked.tensor(layer, stack)) not in self.tensors:
                raise self._missing(tensor)
            self._is_transposed(stacked, tensor, stack)
        return {
            self.architecture.expert_tensor(layer, expert, projection): TensorRole(
                role=ROUTED_EXPERTS, layer=layer, expert=expert, projection=projection
            )
            for expert in range(moe.experts)
            for projection in moe.projections
        }

    def check_biases(
        self, stacked: StackedExperts, layers: Iterable[int], roles: Mapping[str, TensorRole]
    ) -> None:
        """Every layer with experts has biases of the right shape, and no other layer has."""
        wanted = {
            stacked.bias(layer, stack): stacked.bias_shape(stack, self.moe)
            for layer in layers
            for stack in stacked.tensors
        }
        for name, shape in wanted.items():
            if name not in self.tensors:
                raise self._missing(name)
            found = tuple(self.tensors[name].shape)
            if found != shape:
                raise CheckpointError(
                    f"{name}: shape {list(found)}, but by config.json the biases of all experts of "
                    f"a layer are {list(shape)}; fetch the checkpoint again"
                )
        for name, role in roles.items():
            if role.role == EXPERT_BIAS and name not in wanted:
                raise self._surplus(name)

    def check_shapes(self, roles: Mapping[str, TensorRole]) -> None:
        """Every expert with tensors of its own has the shapes [N, K] that config.json gives."""
        for name, role in roles.items():
            if role.projection is None or role.expert is None or name not in self.tensors:
                continue
            shape, wanted = tuple(self.tensors[name].shape), self.moe.shape(role.projection)
            if shape != wanted:
                advice = self.architecture.how_to_fix("`projections` or a key under `config`")
                raise CheckpointError(
                    f"{name}: shape {list(shape)}, but config.json gives the {role.projection} "
                    f"projection of an expert the shape {list(wanted)}; fetch the checkpoint "
                    f"again, or {advice}"
                )

    def _missing(self, name: str) -> CheckpointError:
        return self._unexpected(
            f"{name}: missing", "`experts` or `stacked`", "the tensor has another name there"
        )

    def _surplus(self, name: str) -> CheckpointError:
        return self._unexpected(
            f"{name}: not expected",
            "`config.experts` or `sparse`",
            "the number of experts is read from the wrong key",
        )

    def _unexpected(self, found: str, key: str, cause: str) -> CheckpointError:
        moe = self.moe
        return CheckpointError(
            f"{found}; config.json says {moe.experts} experts in {len(moe.sparse_layers)} of "
            f"{moe.layers} layers. Fetch the checkpoint again, or correct its config.json; "
            f"{self.architecture.how_to_fix(key, cause)}"
        )


_ORIENTATION = {True: "transposed, [K, N]", False: "[N, K]"}


def biases_of(names: Iterable[str], roles: Mapping[str, TensorRole]) -> set[str]:
    """Tensors with the biases of the layers in which experts called `names` are."""
    layers = {roles[name].layer for name in names if roles[name].role == ROUTED_EXPERTS}
    return {n for n, role in roles.items() if role.role == EXPERT_BIAS and role.layer in layers}
