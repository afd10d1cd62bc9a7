"""What stands in for DeepEP on a CPU: prepare and finalize of vLLM's kernel between two ranks.

Tokens are gathered from all ranks, and each rank keeps those of its experts: as rows whose other
experts are one of another rank, or in a batch for each expert, with NaN in places that hold none.
As with DeepEP, both are asynchronous, so that vLLM's kernel runs shared experts, and the scales of
batches are transposed in memory.
"""

from __future__ import annotations

import torch
from torch import distributed
from vllm.distributed import get_dp_group
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.v1.worker.workspace import init_workspace_manager

from moequant.integrations.vllm import all_to_all
from moequant.runtime.activations import quantize_activations


class _Sent(mk.FusedMoEPrepareAndFinalizeModular):
    def __init__(self, tokens, moe):
        super().__init__()
        self._tokens = tokens
        self._here = moe.num_local_experts
        self._group = get_dp_group()
        self._first = self._group.rank_in_group * self._here

    def num_dispatchers(self):
        return len(self._tokens)

    def output_is_reduced(self):
        return True

    def topk_indices_dtype(self):
        return torch.int64

    def _gather(self, tensor):
        """Rows of all ranks, as bytes where gloo does not know the dtype."""
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        padded = data.new_zeros(max(self._tokens), *data.shape[1:])
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in self._tokens]
        distributed.all_gather(found, padded, group=self._group.cpu_group)
        rows = [part[:size] for part, size in zip(found, self._tokens, strict=True)]
        return torch.cat(rows).view(tensor.dtype)

    def supports_async(self):
        return True

    def prepare_async(self, *arguments, **others):
        return lambda: self.prepare(*arguments, **others)

    def finalize_async(self, *arguments):
        return lambda: self.finalize(*arguments)

    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, on_input, quant_config, **others
    ):
        assert topk_ids.dtype == torch.int64
        scale = None
        if quant_config.is_block_quantized:
            assert quant_config.block_shape == [128, 128]
            quantized = quantize_activations(a1, "fp8_group128")
            a1, scale = quantized.qdata, self._gather(quantized.scale)
        self._ids, self._weights = self._gather(topk_ids), self._gather(topk_weights)
        return self._laid_out(self._gather(a1), scale, num_experts)

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, reduce):
        total = self._summed(fused_expert_output, reduce)
        distributed.all_reduce(total, group=self._group.cpu_group)
        output.copy_(total.split(self._tokens)[self._group.rank_in_group])


class Rows(_Sent):
    @property
    def activation_format(self):
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self):
        return None

    def _laid_out(self, x, scale, num_experts):
        local = (self._ids >= self._first) & (self._ids < self._first + self._here)
        elsewhere = num_experts - 1 if self._first == 0 else 0
        ids = torch.where(local, self._ids, elsewhere)
        self._kept = local.any(1)
        meta = mk.ExpertTokensMetadata.make_from_list([0] * self._here, "cpu")
        scale = None if scale is None else scale[self._kept]
        return x[self._kept], scale, meta, ids[self._kept], self._weights[self._kept]

    def _summed(self, rows, reduce):
        assert isinstance(reduce, TopKWeightAndReduceNoOP)
        total = torch.zeros(sum(self._tokens), rows.shape[1])
        total[self._kept] = rows.float()
        return total


class Batches(_Sent):
    @property
    def activation_format(self):
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self):
        return max(self._tokens)

    def prepare_async(self, *arguments, **others):
        return (lambda: None), super().prepare_async(*arguments, **others)

    def finalize_async(self, *arguments):
        return (lambda: None), super().finalize_async(*arguments)

    def _laid_out(self, x, scale, num_experts):
        places = self.max_num_tokens_per_rank() * self.num_dispatchers()
        self._pairs = [
            (self._ids == self._first + e).nonzero(as_tuple=True) for e in range(self._here)
        ]
        counts = torch.tensor([len(token) for token, _ in self._pairs], dtype=torch.int32)
        meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
        scales = None
        if scale is not None:
            scales = self._batches(scale, places).mT.contiguous().mT
        return self._batches(x, places), scales, meta, None, None

    def _batches(self, x, places):
        data = torch.full((self._here, places, x.shape[1]), torch.nan).to(x.dtype)
        for e, (token, _) in enumerate(self._pairs):
            data[e, : len(token)] = x[token]
        return data

    def _summed(self, batches, reduce):
        assert isinstance(reduce, TopKWeightAndReduceDelegate)
        total = torch.zeros(sum(self._tokens), batches.shape[2])
        for e, (token, t) in enumerate(self._pairs):
            weight = self._weights[token, t, None].float()
            total[token] += weight * batches[e, : len(token)].float()
        return total


def install(tokens):
    """Make vLLM take these for DeepEP's; `tokens` are each rank's number."""

    def make(moe, quant_config, routing_tables=None, allow_new_interface=False):
        assert allow_new_interface
        kind = Batches if moe.moe_parallel_config.use_batched_activation_format else Rows
        return kind(tokens, moe)

    init_workspace_manager(torch.device("cpu"))  # as a worker of vLLM does
    all_to_all.maybe_make_prepare_finalize = make
    # DeepEP needs some multiples of columns, and says so by classes that import it.
    all2all_utils.maybe_roundup_layer_hidden_size = lambda hidden_size, *_: hidden_size
