"""Experts between vLLM's dispatch and combine, by which tokens reach the ranks of their experts.

vLLM's `FusedMoEKernel` holds three parts: prepare sends tokens to ranks, experts compute, finalize
sends their results back. Prepare and finalize are vLLM's own; here are experts of its interface
that run ours. Tokens arrive in one of two forms:

standard   rows with ids and weights, of which our experts return the weighted sum of a row
batches    up to C tokens for each expert here and their number; results are not weighted. They are
           rows with one id each, or none behind an expert's number, for the same backend

Where experts quantize tokens in groups of 128 columns, as DeepEP can, it sends FP8; else what it
gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from moequant.errors import UnsupportedError
from moequant.integrations.vllm.warm_up import warm_up_smaller
from moequant.runtime.activations import FP8_TENSOR

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime import FusedExperts
    from moequant.runtime.warm_up import Mode

_GROUP = 128
_GROUP_SCHEME = f"fp8_group{_GROUP}"


def make_kernel(
    name: str, moe: Any, experts: FusedExperts, routing_tables: Any, warm_up: Mode
) -> Any:
    """The kernel of vLLM's for a layer whose tokens are sent to experts.

    Args:
        name: of the layer.
        moe: vLLM's config of the layer.
        experts: of this rank, without a map of ids if tokens come in batches.
        routing_tables: of the layer, for dispatchers that need them.
        warm_up: of smaller numbers of rows, see `warm_up_smaller`.

    Raises:
        UnsupportedError: activations that this way of sending tokens does not leave as they are.
    """
    quantization = _quantization(experts)
    between = maybe_make_prepare_finalize(
        moe, quantization, routing_tables=routing_tables, allow_new_interface=True
    )
    if between.activation_format != SentBatches.activation_format():
        return FusedMoEKernel(between, SentRows(experts, moe, quantization, warm_up))
    if experts.packed().workload.activations == FP8_TENSOR:
        raise UnsupportedError(
            f"{name}: activations {FP8_TENSOR} have one scale for all tokens, but "
            f"--all2all-backend {moe.moe_parallel_config.all2all_backend} sends batches, some "
            "places of which hold none; choose other activations or another all-to-all"
        )
    sizes = {
        "max_num_tokens": between.max_num_tokens_per_rank(),
        "num_dispatchers": between.num_dispatchers(),
    }
    return FusedMoEKernel(between, SentBatches(experts, moe, quantization, **sizes))


def _quantization(experts: FusedExperts) -> Any:
    """How experts take tokens, in vLLM's words: in FP8 by groups, or as they are."""
    packed = experts.packed()
    w = packed.workload
    if w.activations == _GROUP_SCHEME and packed.takes_quantized and w.hidden % _GROUP == 0:
        return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[_GROUP, _GROUP])
    return FusedMoEQuantConfig.make()


class _SentTokens(FusedMoEExpertsModular):  # type: ignore[misc]
    """Our experts in vLLM's interface of experts.

    vLLM asks what experts support where it chooses among its own. These were chosen by the user,
    and what they do not run was refused before, so that the answers are all yes.
    """

    def __init__(self, experts: FusedExperts, moe: Any, quantization: Any, **sizes: int) -> None:
        super().__init__(moe, quantization, **sizes)
        self._experts = experts

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: object) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: object) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        """Ids may be of all ranks' experts; vLLM 0.22.1 asks."""
        return True

    def moe_problem_size(
        self, a1: Tensor, w1: object, w2: object, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        """E, M or C, rows of gate and up, H, and T; of packed experts, not of `w1` and `w2`."""
        w = self._experts.packed().workload
        rows = w.intermediate * (2 if w.act_fn.gated else 1)
        return w.experts, a1.shape[-2], rows, a1.shape[-1], topk_ids.shape[1]


class SentRows(_SentTokens):
    """Tokens of other ranks as rows, with the ids and weights of their experts."""

    def __init__(self, experts: FusedExperts, moe: Any, quantization: Any, warm_up: Mode) -> None:
        super().__init__(experts, moe, quantization)
        self._warm_up, self._called = warm_up, False

    @staticmethod
    def activation_format() -> Any:
        """Rows."""
        return FusedMoEActivationFormat.Standard

    def workspace_shapes(self, M: int, N: int, K: int, *_: object) -> tuple[tuple[int, ...], ...]:
        """No scratch memory of vLLM's, and the result."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Nothing is left of a rank's share."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: object,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: object,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sums, [M, H]; weights that are in the input already count as 1."""
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        call = (hidden_states, topk_weights, topk_ids)
        self._experts(*call, hidden_scale=a1q_scale, out=output)
        if not self._called:
            self._called = True
            warm_up_smaller(self._experts, self._warm_up, *call, hidden_scale=a1q_scale)


class SentBatches(_SentTokens):
    """Tokens of all ranks in batches, one for each expert here."""

    @staticmethod
    def activation_format() -> Any:
        """Batches."""
        return FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, experts: int, local_experts: int, *_: object
    ) -> tuple[tuple[int, ...], ...]:
        """No scratch memory of vLLM's, and the result for all places."""
        return (0,), (0,), (local_experts, M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Finalize weights results and adds them up."""
        return TopKWeightAndReduceDelegate()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: object,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write every expert's results for its tokens, [E, C, H], and 0 for places without one."""
        E, C, H = hidden_states.shape
        device = hidden_states.device
        counts = expert_tokens_meta.expert_num_tokens[:E]
        taken = torch.arange(C, device=device) < counts[:, None]
        ids = torch.where(taken, torch.arange(E, device=device)[:, None], -1)
        scale = None if a1q_scale is None else a1q_scale.reshape(E * C, -1)
        self._experts(
            hidden_states.reshape(E * C, H),
            torch.ones(E * C, 1, device=device),
            ids.reshape(E * C, 1),
            hidden_scale=scale,
            out=output.view(E * C, H),
        )
