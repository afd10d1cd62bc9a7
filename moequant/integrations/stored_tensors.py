"""The tensors of a source as its unquantized release has them, each read when it is needed.

transformers' loader takes objects that it indexes with `[...]` to read them. Quantized weights are
decoded then; those of experts that the release stacks become a stack again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.conversion.stack import plain_stack
from moequant.models import PROJECTIONS, ROUTED_EXPERTS
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import PartInfo, read_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.conversion.stack import Stack
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.source_model import SourceModel
    from moequant.weights.source_weights import WeightInfo


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor, or a weight that decodes to one, by its name in the unquantized release.

    Attributes:
        checkpoint: where it is.
        info: what its headers say.
    """

    checkpoint: Checkpoint
    info: WeightInfo

    def __getitem__(self, _: object) -> Tensor:
        """Read it into CPU memory; raises as `read_weights`."""
        return read_weights(self.checkpoint, [self.info])[0]


@dataclass(frozen=True, kw_only=True)
class StoredStack:
    """A tensor that stacks the experts of a layer, whose parts are quantized one by one.

    Attributes:
        checkpoint: where they are.
        experts: of each expert, in order, its parts in the order of the stack.
        stack: how the release stacks them.
        dtype: of the stack.
    """

    checkpoint: Checkpoint
    experts: Sequence[Sequence[EncodedInfo]]
    stack: Stack
    dtype: torch.dtype

    def __getitem__(self, _: object) -> Tensor:
        """Read and decode one expert after the other; raises as `read_weights`."""
        whole: Tensor | None = None
        for index, infos in enumerate(self.experts):
            one = self.stack.join(read_weights(self.checkpoint, infos))
            if whole is None:
                whole = torch.empty((len(self.experts), *one.shape), dtype=self.dtype)
            whole[index] = one
        assert whole is not None, "a layer has experts"
        return whole.flatten(0, 1) if self.stack.flat else whole


def stored_tensors(
    checkpoint: Checkpoint, source: SourceModel, dtype: torch.dtype
) -> Mapping[str, StoredTensor | StoredStack]:
    """Every tensor of the unquantized release by name, in natural order; nothing is read.

    Args:
        checkpoint: the source.
        source: what is known of it.
        dtype: of stacks that are put together; other weights keep theirs, or are float32.
    """
    parts = {
        part.name
        for info in source.weights.values()
        if isinstance(info, EncodedInfo)
        for part in info.parts
    } | {info.name for info in source.dropped}
    found: dict[str, StoredTensor | StoredStack] = {
        name: StoredTensor(checkpoint=checkpoint, info=info)
        for name, info in checkpoint.tensors.items()
        if name not in parts
    }
    stacks: dict[str, dict[int, list[tuple[EncodedInfo, Stack]]]] = {}
    stacked = source.dialect is not None and source.dialect.stacks
    for name, info in source.weights.items():
        if not isinstance(info, EncodedInfo):
            continue
        stack = plain_stack(info, source.model, stacked=stacked)
        if stack is None:
            found[name] = StoredTensor(checkpoint=checkpoint, info=info)
        else:
            experts = stacks.setdefault(stack.tensor, {})
            experts.setdefault(stack.expert, []).append((info, stack))
    for name, experts in stacks.items():
        found[name] = StoredStack(
            checkpoint=checkpoint,
            experts=[_in_order(experts[expert], source) for expert in sorted(experts)],
            stack=next(iter(experts.values()))[0][1],
            dtype=dtype,
        )
    return found


def stored_projections(source: SourceModel) -> Mapping[str, frozenset[str]]:
    """Which projections of routed experts each of `stored_tensors` holds: gate, up, down."""
    found: dict[str, frozenset[str]] = {}
    stacked = source.dialect is not None and source.dialect.stacks
    for name, role in source.model.roles.items():
        if role.role != ROUTED_EXPERTS or role.expert is None:
            continue
        assert role.projection is not None, name
        info, stored = source.weights[name], name
        if isinstance(info, PartInfo):
            stored = info.place.tensor
        elif isinstance(info, EncodedInfo):
            stack = plain_stack(info, source.model, stacked=stacked)
            stored = name if stack is None else stack.tensor
        found[stored] = found.get(stored, frozenset()) | {role.projection}
    return found


def _in_order(parts: Sequence[tuple[EncodedInfo, Stack]], source: SourceModel) -> list[EncodedInfo]:
    """The parts of one expert in a stack: gate before up, whatever their names are."""
    order = (*PROJECTIONS, None)
    infos = [info for info, _ in parts]
    return sorted(infos, key=lambda info: order.index(source.model.roles[info.name].projection))
