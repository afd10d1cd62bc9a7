"""The modules of a checkpoint by its headers alone, however wrong they are.

The readers of `moequant.weights` refuse a checkpoint whose tensors and config.json contradict each
other. Here such a module is described, so that `check` can say which engine it breaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.dialects.names import ACTIVATION_SCALES
from moequant.models import ROUTED_EXPERTS
from moequant.weights.source_model import CODE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from moequant.dialects import Dialect
    from moequant.models import Architecture, MoeConfig, TensorRole
    from moequant.storage.headers import TensorInfo

MTP = "mtp"
"""The group of multi-token-prediction layers, whatever their modules are."""
ROUTER = "router"
OTHER = "other"
"""The group of quantized modules that no list is asked about here, such as the head and vision."""
_LINEARS = ("attention", "dense_mlp", "shared_experts")
# Projections of multi-token-prediction layers that no engine quantizes.
_PLAIN_MTP = ("eh_proj", "fc")


@dataclass(frozen=True, kw_only=True)
class Module:
    """A linear layer or router, as the headers describe it.

    Attributes:
        name: without the last component of its tensors' names.
        role: its role, layer, expert and projection.
        group: experts, linears, router, MTP or OTHER.
        parts: its tensors, by the last component of their names.
        quantized: whether it is stored as codes.
        stated: its format by config.json; None if that says it is not quantized.
    """

    name: str
    role: TensorRole
    group: str
    parts: Mapping[str, TensorInfo]
    quantized: bool
    stated: str | None

    @property
    def shape(self) -> tuple[int, int] | None:
        """[N, K] where the weight itself, or its 8-bit codes, are a tensor; else None."""
        weight = self.parts.get("weight")
        return weight.shape if weight is not None and len(weight.shape) == 2 else None

    def encoded_parts(self, dialect: Dialect) -> dict[str, TensorInfo]:
        """The tensors of its weight by suffix, in the order of the encoding of its format."""
        assert self.stated is not None
        suffixes = dialect.encoding(self.stated).suffixes
        return {suffix: self.parts[suffix] for suffix in suffixes if suffix in self.parts}


def modules_in(
    tensors: Mapping[str, TensorInfo],
    architecture: Architecture,
    moe: MoeConfig,
    dialect: Dialect,
    format_of: Callable[[str], str | None],
) -> Iterator[Module]:
    """Every module that engines look up in a quantization_config or that is quantized, in order.

    Experts that are stacked in tensors of all experts of a layer come once, as the first of them.

    Raises:
        UnsupportedError: config.json gives a module an unknown scheme, or a tensor looks like an
            expert but matches no pattern of the architecture.
    """
    suffixes = {s for e in dialect.encodings.values() for s in e.suffixes} - {"weight"}
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        parts.setdefault(module, {})[leaf] = info
    for name, own in parts.items():
        stack = _stack_in({k: v for k, v in own.items() if k not in suffixes}, architecture)
        if stack is not None:
            assert stack.layer is not None
            first = architecture.expert_tensor(stack.layer, 0, "down").removesuffix(".weight")
            yield Module(
                name=first, role=stack, group=_group(first, stack, moe) or ROUTED_EXPERTS,
                parts=own, quantized=False, stated=format_of(first),
            )  # fmt: skip
            continue
        telling = suffixes & own.keys() - {*ACTIVATION_SCALES}
        weight = own.get("weight")
        if not telling and (weight is None or len(weight.shape) != 2):
            continue
        role = architecture.classify(f"{name}.weight")
        quantized = bool(telling) or (weight is not None and weight.dtype in CODE_DTYPES)
        is_other = quantized and role.role != MTP
        group = _group(name, role, moe) or (OTHER if is_other else None)
        if group is not None:
            stated = format_of(name)
            yield Module(
                name=name, role=role, group=group, parts=own, quantized=quantized, stated=stated
            )


def _stack_in(parts: Mapping[str, TensorInfo], architecture: Architecture) -> TensorRole | None:
    """The role of a tensor among `parts` that stacks unquantized experts; None if none does."""
    stacks = (architecture.classify(info.name) for info in parts.values() if len(info.shape) == 3)
    found = (r for r in stacks if r.role == ROUTED_EXPERTS and r.expert is None)
    return next(found, None)


def _group(name: str, role: TensorRole, moe: MoeConfig) -> str | None:
    """The group of a module; None for one that engines do not look up."""
    leaf = name.rpartition(".")[2]
    is_mtp = role.role == MTP or (role.layer is not None and role.layer >= moe.layers)
    if is_mtp:
        linear = role.role in (*_LINEARS, ROUTED_EXPERTS) or leaf.endswith("_proj")
        return MTP if linear and leaf not in _PLAIN_MTP else None
    if role.role in (ROUTED_EXPERTS, ROUTER):
        return role.role
    return "linears" if role.role in _LINEARS else None
