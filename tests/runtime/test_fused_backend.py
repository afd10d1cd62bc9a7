"""FusedExperts around a backend that lays out the weights anew and gives them back as views."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from moequant.runtime import FusedExperts, backends, fused_experts
from moequant.runtime.backends import FusedBackend


class Stacks(FusedBackend):
    """Keeps every part beside another of its bytes; computes by the reference."""

    name = "stacks"
    default_on = ()

    def __init__(self):
        self.packs = 0

    def supports(self, workload):
        return None

    def pack(self, weights, activations):
        self.packs += 1
        both = {name: torch.stack([t, t], dim=1) for name, t in weights.tensors().items()}
        return weights.replace({name: t[:, 0] for name, t in both.items()})

    def adopted(self, packed):
        return packed

    def forward(
        self, packed, hidden_states, topk_ids, topk_weights, *, expert_map, workspace, **options
    ):
        reference = FusedExperts(packed, backend="torch_reference")
        return reference(hidden_states, topk_ids, topk_weights, expert_map=expert_map, **options)


@pytest.fixture
def stacks(monkeypatch):
    backend = Stacks()
    monkeypatch.setitem(backends.backends(), backend.name, backend)
    return backend


@pytest.fixture
def outputs(layers, every_format):
    """A call, and what layers of two seeds make of it."""
    layer, other = (layers.make(every_format, seed=seed) for seed in (0, 1))
    return layer.call, *(FusedExperts(x.weights)(*layer.call) for x in (layer, other))


def test_weights_are_laid_out_once_and_adopted(layers, every_format, stacks, outputs):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="stacks")
    before = {name: t.clone() for name, t in experts.state_dict().items()}
    for _ in range(2):
        assert torch.equal(experts(*call), want)
    assert stacks.packs == 1
    assert experts.weights is experts.packed_weights()
    for name, tensor in experts.state_dict().items():
        as_bytes = (t.contiguous().view(torch.uint8) for t in (tensor, before[name]))
        assert torch.equal(*as_bytes)


def test_a_copy_is_a_module_of_its_own(layers, every_format, stacks, outputs):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="stacks")
    experts(*call)
    other = copy.deepcopy(experts)
    for tensor in experts.buffers():
        tensor.zero_()
    assert not experts(*call).any()
    assert torch.equal(other(*call), want)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_weights_loaded_later_count_in_inference_mode_or_not(
    layers, every_format, stacks, outputs, assign, first, then
):
    call, _, want = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="stacks")
    with torch.inference_mode(mode=first):
        experts(*call)
    state = FusedExperts(layers.make(every_format, seed=1).weights).state_dict()
    with torch.inference_mode(mode=then):
        experts.load_state_dict(state, assign=assign)
    assert torch.equal(experts(*call), want)


def test_first_calls_of_several_threads_agree(layers, every_format, stacks, outputs):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="stacks")
    got = []
    threads = [threading.Thread(target=lambda: got.append(experts(*call))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(torch.equal(y, want) for y in got)


def test_a_call_without_a_module_leaves_the_weights_alone(layers, every_format, stacks, outputs):
    (hidden, ids, topk_weights), want, _ = outputs
    weights = layers.make(every_format).weights
    before = dict(weights.tensors())
    for _ in range(2):
        y = fused_experts(hidden, weights, topk_weights, ids, backend="stacks")
        assert torch.equal(y, want)
    assert stacks.packs == 1
    assert all(before[name] is tensor for name, tensor in weights.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_weight_on_the_input_reaches_any_backend_as_a_weight_of_one(
    layers, stacks, monkeypatch, dtype
):
    layer = layers.make(T=1, dtype=dtype)
    weights = layer.topk_weights / 2
    seen = []
    forward = stacks.forward

    def watched(packed, x, ids, topk_weights, **options):
        seen.append((x, topk_weights))
        return forward(packed, x, ids, topk_weights, **options)

    monkeypatch.setattr(stacks, "forward", watched)
    call = (layer.hidden, layer.ids, weights)
    got = FusedExperts(layer.weights, backend="stacks")(*call, apply_router_weight_on_input=True)
    want = FusedExperts(layer.weights)(*call, apply_router_weight_on_input=True)
    assert got.dtype == dtype
    assert torch.equal(got, want)
    ((x, ones),) = seen
    assert torch.equal(x, layer.hidden.float() * weights)
    assert (ones == 1).all()
