"""What a backend is: one way to run the experts of a layer, of one of three kinds.

A call of `FusedExperts` is prepare (quantize activations, route, permute), the two GEMMs of every
expert with what lies between them, and finalize (weight, reduce). An `ExpertsBackend` is the middle
alone, over rows sorted by expert; a `BatchedExpertsBackend` the same over a batch per expert; a
`FusedBackend` is all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moequant.act_fn import SILU, ActFn

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from moequant.runtime.activations import Activations
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.routing import Permutation
    from moequant.runtime.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a backend is asked to run.

    Attributes:
        format: name of the format of the weights.
        activations: a scheme of `moequant.runtime.activations`.
        experts: E, on this device.
        hidden: H.
        intermediate: I.
        device: where weights and activations are.
        act_fn: the function between the GEMMs.
        bias: whether any projection has one.
    """

    format: str
    activations: str
    experts: int
    hidden: int
    intermediate: int
    device: torch.device
    act_fn: ActFn = SILU
    bias: bool = False


class Backend(ABC):
    """What every kind says about themselves; one file, and one line in REGISTRY."""

    name: ClassVar[str]
    default_on: ClassVar[tuple[str, ...]]
    """Types of device it is chosen on unasked; on others it runs only when named."""

    @abstractmethod
    def supports(self, workload: Workload) -> str | None:
        """None where it can run `workload`, else why not, in one clause."""


class ExpertsBackend(Backend):
    """The GEMMs of every expert and what lies between them, on rows that are sorted by expert."""

    @abstractmethod
    def run(
        self, activations: Activations, weights: ExpertWeights, permutation: Permutation
    ) -> Tensor:
        """Every expert's result for its rows, not yet weighted.

        Args:
            activations: M tokens of H columns.
            weights: the experts here.
            permutation: the rows of each expert.

        Returns:
            [M * T, H] float32 in the order of `permutation`; 0 in rows that belong to no expert.
        """


class BatchedExpertsBackend(Backend):
    """The same over a batch per expert, as an expert-parallel dispatch leaves it."""

    @abstractmethod
    def run(self, tokens: BatchedTokens, weights: ExpertWeights) -> Tensor:
        """Every expert's result for its tokens, not yet weighted.

        Args:
            tokens: at most C tokens of H columns for each of the E experts.
            weights: the experts here.

        Returns:
            [E, C, H] float32 or bfloat16; rows at or beyond an expert's count hold anything.
        """


class FusedBackend(Backend):
    """The whole of a call: it sorts, quantizes, weights and adds up by itself."""

    takes_quantized: ClassVar[bool] = False
    """Whether `forward` takes hidden states that are quantized."""

    @abstractmethod
    def pack(self, weights: ExpertWeights, activations: str) -> object:
        """The weights as `forward` wants them; made once, and again only after they changed.

        Args:
            weights: the experts here.
            activations: the scheme by which `forward` quantizes, as `supports` was asked.
        """

    def adopted(self, packed: object) -> ExpertWeights | None:
        """The weights given to `pack` as views into `packed`; None where it holds no copy of them.

        Whoever gave them may let go of what it has and keep these.
        """
        return None

    def workspace_bytes(self, packed: object, tokens: int, topk: int) -> int:
        """Bytes of scratch memory that `forward` wants for [tokens, topk] slots; 0 for none."""
        return 0

    def kernels_for(self, packed: object, tokens: int, topk: int) -> Hashable:
        """Names the compiled kernels that `forward` runs for [tokens, topk] slots.

        Calls of equal names run the same kernels. None: nothing is compiled.
        """
        return None

    @abstractmethod
    def forward(
        self,
        packed: object,
        hidden_states: Tensor | Activations,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        expert_map: Tensor | None,
        workspace: Tensor,
    ) -> Tensor:
        """Every token's output, [M, H] in the dtype of `hidden_states`; bfloat16 if quantized.

        Shapes, dtypes and devices are as `FusedExperts.forward` wants them, and checked.

        Args:
            packed: what `pack` made.
            hidden_states: [M, H]; as they are, or, only if `takes_quantized`, quantized by the
                scheme given to `pack`.
            topk_ids: [M, T].
            topk_weights: [M, T].
            expert_map: [global experts], index here or -1.
            workspace: uint8, at least `workspace_bytes`, with anything in it; the next call of any
                layer may have it.
        """
