"""Experts between vLLM's dispatch and combine, by which tokens reach the ranks of their experts.

vLLM's `FusedMoEKernel` holds three parts: prepare sends tokens to ranks, experts compute, finalize
sends their results back. Prepare and finalize are vLLM's own; here are experts of its interface
that run ours. Tokens arrive in one of two forms:

rows       with ids and weights, for each of which our experts return the weighted sum
batches    of up to C tokens for each expert here, with their number; results are not weighted. We
           run them as rows: a place that holds a token has its expert's id, others have -1

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

from moequant.runtime.activations import quantize_activations

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime import FusedExperts

_GROUP = 128
_GROUP_SCHEME = f"fp8_group{_GROUP}"


def make_kernel(moe: Any, experts: FusedExperts, routing_tables: Any, *, batches: bool) -> Any:
    """The kernel of vLLM's for a layer whose tokens are sent to experts.

    Args:
        moe: vLLM's config of the layer.
        experts: of this rank, without a map of ids if tokens come in batches.
        routing_tables: of the layer, for dispatchers that need them.
        batches: whether tokens come in batches.
    """
    quantization = FusedMoEQuantConfig.make()
    if _sends_fp8(experts):
        quantization = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[_GROUP, _GROUP])
    between = maybe_make_prepare_finalize(
        moe, quantization, routing_tables=routing_tables, allow_new_interface=True
    )
    kind = SentBatches if batches else SentRows
    assert between.activation_format == kind.activation_format()
    sizes = {}
    if batches:
        sizes = {
            "max_num_tokens": between.max_num_tokens_per_rank(),
            "num_dispatchers": between.num_dispatchers(),
        }
    return FusedMoEKernel(between, kind(experts, moe, quantization, **sizes))


def as_sent(experts: FusedExperts, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens [M, H] as experts get them, and their scales [M, H / 128] if they come in FP8."""
    if not _sends_fp8(experts):
        return x, None
    sent = quantize_activations(x, _GROUP_SCHEME)
    return sent.qdata, sent.scale


def _sends_fp8(experts: FusedExperts) -> bool:
    packed = experts.packed()
    w = packed.workload
    return w.activations == _GROUP_SCHEME and packed.takes_quantized and w.hidden % _GROUP == 0


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

    @staticmethod
    def activation_format() -> Any:
        """Rows."""
        return FusedMoEActivationFormat.Standard

    def workspace_shapes(self, M: int, N: int, K: int, *_: object) -> tuple[tuple[int, ...], ...]:
        """No scratch memory of vLLM's, and the result."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Results are weighted and summed already."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        *,
        output: Tensor,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        a1q_scale: Tensor | None,
        apply_router_weight_on_input: bool,
        **_: object,
    ) -> None:
        """Write the weighted sums, [M, H]; weights that are in the input already count as 1."""
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        self._experts(hidden_states, topk_weights, topk_ids, hidden_scale=a1q_scale, out=output)


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
        *,
        output: Tensor,
        hidden_states: Tensor,
        a1q_scale: Tensor | None,
        expert_tokens_meta: Any,
        **_: object,
    ) -> None:
        """Write every expert's results for its tokens, [E, C, H], and 0 for places without one."""
        E, C, H = hidden_states.shape
        device = hidden_states.device
        counts = expert_tokens_meta.expert_num_tokens
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
