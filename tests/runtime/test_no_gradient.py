"""Experts have no gradient: a backward pass that reaches them is refused, a forward pass is not."""

from __future__ import annotations

import pytest
import torch

from moequant.act_fn import SILU
from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, fused_experts, pack_experts
from moequant.runtime.batched import largest_batch, prepare_batched
from moequant.runtime.no_gradient import refuse_gradient
from moequant.runtime.routing import route
from moequant.runtime.vllm_functions import run_cutlass_moe_fp8

refused = pytest.raises(UnsupportedError, match="a backward pass reached experts")


def call_with_gradient(layer, position):
    """A call whose hidden states (0) or router weights (1) require a gradient."""
    call = [t.clone() for t in layer.call]
    call[position].requires_grad_()
    return call


either = pytest.mark.parametrize("position", [0, 1], ids=["hidden_states", "topk_weights"])


@either
@pytest.mark.parametrize("max_tokens", [8192, 4])
def test_a_backward_pass_is_refused(layers, position, max_tokens):
    layer = layers.make()
    experts = FusedExperts(layer.weights, max_tokens=max_tokens)
    expected = experts(*layer.call)
    hidden, *routing = call_with_gradient(layer, position)
    result = experts(hidden, *routing)
    assert torch.equal(result, expected)
    with refused:
        (hidden + result).sum().backward()
    assert hidden.grad is None


def test_router_weights_on_the_input_are_refused_too(layers):
    layer = layers.make(T=1)
    call = call_with_gradient(layer, 1)
    with refused:
        FusedExperts(layer.weights)(*call, apply_router_weight_on_input=True).sum().backward()


def test_packed_experts_refuse_it_without_a_module(layers):
    layer = layers.make()
    hidden, *routing = call_with_gradient(layer, 0)
    with refused:
        fused_experts(hidden, pack_experts(layer.weights), *routing).sum().backward()


def test_the_result_may_be_written_to(layers):
    layer = layers.make()
    experts = FusedExperts(layer.weights)
    result = experts(*call_with_gradient(layer, 0))
    result.mul_(2).add_(1)
    assert torch.equal(result, experts(*layer.call) * 2 + 1)
    with refused:
        result.sum().backward()


def test_memory_given_for_the_result_keeps_no_graph(layers):
    layer = layers.make()
    experts = FusedExperts(layer.weights)
    out = torch.empty_like(layer.hidden)
    result = experts(*call_with_gradient(layer, 0), out=out)
    assert result.data_ptr() == out.data_ptr()
    assert not out.requires_grad
    with refused:
        result.sum().backward()


def test_memory_given_to_compiled_calls_keeps_no_graph(layers):
    layer = layers.make()
    experts = FusedExperts(layer.weights)
    compiled = torch.compile(experts, backend="eager")
    out = torch.empty_like(layer.hidden)
    for _ in range(2):
        result = compiled(*call_with_gradient(layer, 0), out=out)
        assert result.data_ptr() == out.data_ptr()
        assert result.requires_grad
        assert not out.requires_grad


def test_inference_tensors_stay_what_they_are():
    with torch.inference_mode():
        result = torch.zeros(3)
    assert refuse_gradient(result, torch.zeros(3, requires_grad=True)) is result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_recorded(layers, mode):
    layer = layers.make()
    call = call_with_gradient(layer, 0)
    with mode():
        assert not FusedExperts(layer.weights)(*call).requires_grad


def test_without_an_argument_that_requires_one_nothing_is_recorded(layers):
    layer = layers.make()
    out = torch.empty_like(layer.hidden)
    result = FusedExperts(layer.weights)(*layer.call, out=out)
    assert result is out
    assert not result.requires_grad


@either
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore:Error detected in")  # where the operator was called
def test_a_compiled_graph_runs_forwards_and_refuses_backwards(layers, position, backend, dynamic):
    layer = layers.make()
    experts = FusedExperts(layer.weights)

    def block(hidden, weights, ids):
        return hidden + experts(hidden * 2, weights.sqrt(), ids)

    torch._dynamo.reset()
    fast = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    result = fast(*call_with_gradient(layer, position))
    assert torch.equal(result, block(*layer.call))
    with refused:
        result.sum().backward()


def batches_of(layer, scheme):
    hidden, weights, ids = call_with_gradient(layer, 0)
    routing = route(weights, ids, experts=layer.weights.experts, expert_map=None, check=True)
    capacity = largest_batch(routing, layer.weights.experts)
    tokens, _ = prepare_batched(
        hidden, routing, experts=layer.weights.experts, capacity=capacity, scheme=scheme
    )
    return tokens


@pytest.mark.parametrize("activations", ["none", "format"])
def test_batches_refuse_it(layers, activations):
    layer = layers.make()
    packed = pack_experts(layer.weights, backend="naive_batched", activations=activations)
    tokens = batches_of(layer, packed.workload.activations)
    with refused:
        packed.run_batches(tokens).sum().backward()


def test_vllm_s_function_for_batches_refuses_it(layers):
    layer = layers.make("fp8_channel")
    tensors = pack_experts(layer.weights, backend="naive_batched").tensors
    tokens = batches_of(layer, "fp8_token")
    result = run_cutlass_moe_fp8(
        torch.empty(tokens.qdata.shape),
        tokens.qdata,
        tensors["w13_qdata"],
        tensors["w2_qdata"],
        None,
        SILU,
        layer.weights.experts,
        None,
        tensors["w13_scale"],
        tensors["w2_scale"],
        tokens.scale,
        None,
        expert_num_tokens=tokens.counts,
        per_act_token=True,
        per_out_ch=True,
        use_batched_format=True,
        topk_weights=None,
    )
    with refused:
        result.sum().backward()
