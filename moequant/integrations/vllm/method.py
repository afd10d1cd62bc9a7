"""MoequantMoEMethod: what vLLM asks for the parameters of a layer's experts, and to run them.

Decisions, each with the failure it prevents:

* No operator of its own for torch.compile. vLLM calls a method within its operators
  `vllm::moe_forward` and `vllm::moe_forward_shared`, which graphs keep whole.
* No kernel of vLLM's (`moe_kernel` stays None), except where an all-to-all sends tokens to the
  ranks of their experts. vLLM then routes, adds shared experts and reduces over ranks itself, as
  for its own methods without one.
* The packed experts are the method's, not a module of the layer. Otherwise vLLM's walks over
  modules, which expect parameters that can be loaded again, would find them.
* A backend is chosen before anything is loaded. Otherwise a layer that nothing runs would be
  refused only after minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.integrations.vllm.activation import INTERLEAVED, act_fn_named
from moequant.integrations.vllm.gpt_oss import GptOssExperts
from moequant.integrations.vllm.layer_limits import (
    check_biases,
    check_blocks,
    check_hidden,
    check_router_weights,
)
from moequant.integrations.vllm.name import BY_BACKEND, RUNS_EXPERTS
from moequant.integrations.vllm.parallelism import sends_tokens
from moequant.integrations.vllm.prepared import PreparedExperts, keeping_nothing
from moequant.integrations.vllm.single import SingleExperts
from moequant.integrations.vllm.stored import RankSizes
from moequant.integrations.vllm.versions import activation_numbers
from moequant.integrations.vllm.warm_up import warm_up_smaller
from moequant.runtime import FusedExperts, select
from moequant.runtime.backends import Workload
from moequant.runtime.packing import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from moequant.integrations.vllm.options import Options
    from moequant.integrations.vllm.scheme import ExpertScheme
    from moequant.integrations.vllm.stored import StoredExperts
    from moequant.runtime import ExpertWeights
    from moequant.runtime.backends import PackedExperts

# In vLLM's own tree of loggers, which prints what is logged.
logger = init_logger("vllm.moequant")


class MoequantMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of one layer.

    Args:
        name: of the layer.
        moe: vLLM's config of the layer.
        scheme: how its experts are stored.
        options: what the user chose.
        dummy: whether vLLM fills parameters with numbers of its own, for a benchmark.
    """

    def __init__(
        self, name: str, moe: Any, *, scheme: ExpertScheme, options: Options, dummy: bool = False
    ) -> None:
        super().__init__(moe)
        self.name = name
        self.scheme = scheme
        self.options = options
        self.dummy = dummy
        self.stored: StoredExperts | None = None
        self.prepared: PreparedExperts | None = None
        self.experts: FusedExperts | None = None
        self._called = False
        self.act_fn = act_fn_named(moe.activation.value, activation_numbers(moe))
        check_biases(
            name,
            has_bias=moe.has_bias,
            interleaved=moe.activation.value == INTERLEAVED,
            stacked=scheme.dialect.stacks,
        )

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """H, and I of a rank: of gpt-oss in whole blocks, as its code in vLLM cuts it.

        Raises:
            UnsupportedError: the way of sending tokens needs another H.
        """
        hidden, intermediate = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        check_hidden(self.name, hidden_size, hidden, moe_parallel_config.all2all_backend)
        if self.scheme.dialect.stacks:
            block = get_format(self.scheme.format).block[1]
            intermediate = -(-intermediate // block) * block
        return hidden, intermediate

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., object],
        **others: object,
    ) -> None:
        """Register the parameters that vLLM's loader fills, on torch's default device.

        Args:
            layer: gets them.
            num_experts: E, of this rank.
            hidden_size: H.
            intermediate_size_per_partition: I of this rank.
            params_dtype: of the model; not used.
            weight_loader: vLLM's, a method of the layer.
            others: what vLLM gives to methods of its own.

        Raises:
            CheckpointError: the prepared folder that was asked for does not fit.
            UnsupportedError: sizes that are not served, or no backend runs the experts.
        """
        check_router_weights(
            self.name,
            on_input=layer.apply_router_weight_on_input,
            experts_per_token=self.moe.experts_per_token,
        )
        sizes = RankSizes(
            experts=num_experts,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition,
            tp_size=self.moe.moe_parallel_config.tp_size,
            gated=self.act_fn.gated,
        )
        kind = GptOssExperts if self.scheme.dialect.stacks else SingleExperts
        if kind is SingleExperts:
            check_blocks(self.name, self.scheme.format, sizes)
        self.stored = kind(self.name, self.scheme, sizes)
        from_prepared = self.options.prepared
        loader = weight_loader
        if from_prepared is not None:
            loader = keeping_nothing(layer, weight_loader)
        self.stored.create(layer, loader)
        device = next(layer.parameters()).device
        self._check_backend(sizes, device)
        if from_prepared is not None:
            self.prepared = PreparedExperts(self.name, from_prepared, sizes, device)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the loaded experts for their backend, or read prepared ones; free the parameters.

        Raises:
            CheckpointError: a tensor was not in the files, or has a value that the format does not;
                or a prepared layer is damaged or stale.
            UnsupportedError: weights are loaded a second time, or tokens cannot be sent to them.
        """
        assert self.stored is not None, f"{self.name}: no parameters were made"
        if self.experts is not None:
            self.stored.refuse_loading()
        if self.dummy:
            self.stored.fill_scales(layer)
        else:
            self.stored.check_loaded()
        self.experts = FusedExperts(
            self._weights(layer),
            backend=self.options.backend,
            activations=self.scheme.choose(self.options.activations),
            # Tokens in batches are known to be of the experts here.
            expert_map=None if self._in_batches else layer.expert_map,
        )
        self.prepared = None
        self.stored.free(layer)
        if sends_tokens(self.moe.moe_parallel_config):
            self.moe_kernel = self._kernel(layer)
            # The kernel is given weights, of which it reads the number of experts here.
            self._no_weights = torch.empty(self.experts.packed().workload.experts, 0, 0)
        self._say(self.experts)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: it describes weights for experts of vLLM's."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object = None,
        shared_experts_input: object = None,
    ) -> Tensor:
        """The routed experts of this rank, [M, H]; vLLM adds shared experts and other ranks.

        Where tokens are sent to the ranks of their experts, the routed experts of all ranks; vLLM's
        kernel may run shared experts meanwhile.

        Args:
            layer: the layer.
            x: [M, H] hidden states.
            topk_weights: [M, T].
            topk_ids: [M, T], of all ranks' experts.
            shared_experts: for vLLM's kernel; without one, vLLM runs them.
            shared_experts_input: likewise.
        """
        assert self.experts is not None, f"{self.name}: not loaded"
        if self.moe_kernel is not None:
            self._warm_up_sent(x, topk_weights, topk_ids)
            sent: Tensor = self.moe_kernel.apply(
                x,
                self._no_weights,
                self._no_weights,
                topk_weights,
                topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
            return sent
        call, on_input = (x, topk_weights, topk_ids), layer.apply_router_weight_on_input
        out: Tensor = self.experts(*call, apply_router_weight_on_input=on_input)
        if not self._called and len(x):
            self._called = True
            warm_up_smaller(
                self.experts, self.options.warm_up, *call, apply_router_weight_on_input=on_input
            )
        return out

    @property
    def _in_batches(self) -> bool:
        """Whether tokens come in a batch for each expert."""
        parallel = self.moe.moe_parallel_config
        return sends_tokens(parallel) and parallel.use_batched_activation_format

    def _warm_up_sent(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        """Compile kernels for tokens that come as rows, in any number, before the first are sent.

        Between dispatch and combine other ranks would wait, which DeepEP does for 100 s at most.
        """
        if self._called or self._in_batches or not len(x):
            return
        from moequant.integrations.vllm.all_to_all import as_sent

        assert self.experts is not None
        self._called = True
        hidden, scale = as_sent(self.experts, x)
        call = (hidden, topk_weights, topk_ids)
        warm_up_smaller(self.experts, self.options.warm_up, *call, hidden_scale=scale)

    def _kernel(self, layer: Any) -> Any:
        """The kernel of vLLM's that holds our experts."""
        # Its modules are needed, and here, only where tokens are sent.
        from moequant.integrations.vllm.all_to_all import make_kernel

        assert self.experts is not None
        tables = layer._expert_routing_tables()
        return make_kernel(self.moe, self.experts, tables, batches=self._in_batches)

    def _weights(self, layer: Any) -> ExpertWeights | PackedExperts:
        """What was loaded, or what was prepared."""
        assert self.stored is not None
        asked = self.options.activations
        if self.prepared is None:
            input_scales = self.scheme.uses_input_scales(asked)
            return self.stored.weights(layer, self.act_fn, input_scales=input_scales)
        return self.prepared.load(
            layer.expert_map,
            self.act_fn,
            backend=self.options.backend,
            activations=self.scheme.choose(asked),
        )

    def _check_backend(self, sizes: RankSizes, device: torch.device) -> None:
        """Check that a backend runs the experts, before they are loaded."""
        asked = self.options.activations
        activations = scheme_of(
            self.scheme.format,
            self.scheme.choose(asked),
            static=self.scheme.uses_input_scales(asked),
        )
        workload = Workload(
            format=self.scheme.format,
            activations=activations,
            experts=sizes.experts,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            device=device,
            act_fn=self.act_fn,
            bias=self.moe.has_bias,
        )
        try:
            select(workload, self.options.backend)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{self.name}: {error}\nChoose others with --additional-config "
                '\'{"moequant": {"activations": NAME, "backend": NAME}}\''
            ) from error

    def _say(self, experts: FusedExperts) -> None:
        """Log what runs the experts; vLLM drops what a process has logged already."""
        packed = experts.packed()
        w = packed.workload
        logger.info_once(
            f"{RUNS_EXPERTS} %s (dialect %s, activations %s, E %d, H %d, I %d of this rank, %s%s) "
            f"{BY_BACKEND} %s on %s%s",
            w.format,
            self.scheme.dialect.name,
            w.activations,
            w.experts,
            w.hidden,
            w.intermediate,
            str(w.act_fn),
            "" if self.options.prepared is None else f", prepared for {self.options.prepared}",
            packed.backend.name,
            str(w.device),
            f", for {packed.layout.why}" if packed.layout.why else "",
        )
