"""FusedExperts around a fused backend with a layout of its own."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, backends, fused_experts, pack_experts
from moequant.runtime.backends import Backend, Layout, PackedExperts
from moequant.runtime.backends.stacked import STACKED


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def flipped(tensor):
    return tensor.contiguous().view(torch.uint8).flip(0).view(tensor.dtype)


class Reversed(Layout):
    """Each tensor of the stacked layout with its experts in reverse."""

    name = "reversed"
    version = 1

    def __init__(self):
        self.packs = 0

    def pack(self, weights):
        self.packs += 1
        return {f"{n}_r": flipped(t) for n, t in STACKED.pack(weights).items()}

    def unpack(self, tensors, workload):
        stacked = {n.removesuffix("_r"): flipped(t) for n, t in tensors.items()}
        return STACKED.unpack(stacked, workload)


class ReversedExperts(PackedExperts):
    def run(self, hidden_states, topk_weights, topk_ids, *, out, workspace, **options):
        tensors = STACKED.pack(self.weights())
        reference = backends.REGISTRY["torch_reference"].load(tensors, self.workload)
        reference.run(
            hidden_states, topk_weights, topk_ids, out=out, workspace=workspace, **options
        )


class Reverses(Backend):
    """A fused backend that packs weights in a layout of its own; computes by the reference."""

    name = "reverses"
    default_on = ()
    experts = ReversedExperts

    def __init__(self):
        self.layout = Reversed()

    def supports(self, workload):
        return None


@pytest.fixture
def reverses(monkeypatch):
    backend = Reverses()
    monkeypatch.setitem(backends.backends(), backend.name, backend)
    return backend


@pytest.fixture
def outputs(layers, every_format):
    """A call, and what layers of two seeds make of it."""
    layer, other = (layers.make(every_format, seed=seed) for seed in (0, 1))
    return layer.call, *(FusedExperts(x.weights)(*layer.call) for x in (layer, other))


def test_weights_are_packed_once_and_are_the_buffers(layers, every_format, reverses, outputs):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="reverses")
    for _ in range(2):
        assert torch.equal(experts(*call), want)
    assert reverses.layout.packs == 1
    stacked = FusedExperts(layers.make(every_format).weights).state_dict()
    assert experts.state_dict().keys() == {f"{name}_r" for name in stacked}


def test_weights_move_from_the_stacked_layout_into_another_and_back(
    layers, every_format, reverses, outputs
):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights)
    assert torch.equal(experts(*call), want)
    experts.backend = "reverses"
    assert torch.equal(experts(*call), want)
    assert all(name.endswith("_r") for name in experts.state_dict())
    weights = layers.make(every_format).weights.tensors()
    for name, tensor in experts.weights.tensors().items():
        assert torch.equal(bytes_of(tensor), bytes_of(weights[name]))
    experts.backend = "torch_reference"
    assert torch.equal(experts(*call), want)
    assert not any(name.endswith("_r") for name in experts.state_dict())


def test_a_call_whose_activations_need_another_layout_is_refused_by_name(
    layers, reverses, monkeypatch
):
    layer = layers.make("fp8_block")
    monkeypatch.setattr(Reverses, "default_on", ("cpu",))
    monkeypatch.setattr(
        type(backends.REGISTRY["torch_reference"]),
        "supports",
        lambda self, workload: None if workload.activations == "none" else "does not run it",
    )
    experts = FusedExperts(layer.weights)
    assert experts.chosen_backend() == "reverses"
    message = "runs on backend 'torch_reference', which reads weights as stacked version 2, but"
    with pytest.raises(UnsupportedError, match=message):
        experts(*layer.call, activations="none")


def test_a_copy_is_a_module_of_its_own(layers, every_format, reverses, outputs):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="reverses")
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
    layers, every_format, reverses, outputs, assign, first, then
):
    call, _, want = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="reverses")
    with torch.inference_mode(mode=first):
        experts(*call)
    other = FusedExperts(layers.make(every_format, seed=1).weights, backend="reverses")
    state = other.state_dict()
    with torch.inference_mode(mode=then):
        experts.load_state_dict(state, assign=assign)
    assert torch.equal(experts(*call), want)


def test_first_calls_of_several_threads_agree(layers, every_format, reverses, outputs):
    call, want, _ = outputs
    experts = FusedExperts(layers.make(every_format).weights, backend="reverses")
    got = []
    threads = [threading.Thread(target=lambda: got.append(experts(*call))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(torch.equal(y, want) for y in got)


def test_a_call_without_a_module_packs_nothing(layers, every_format, reverses, outputs):
    (hidden, topk_weights, ids), want, _ = outputs
    packed = pack_experts(layers.make(every_format).weights, backend="reverses")
    for _ in range(2):
        assert torch.equal(fused_experts(hidden, packed, topk_weights, ids), want)
    assert reverses.layout.packs == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_weight_on_the_input_reaches_any_backend_as_a_weight_of_one(
    layers, reverses, monkeypatch, dtype
):
    layer = layers.make(T=1, dtype=dtype)
    weights = layer.topk_weights / 2
    seen = []
    run = ReversedExperts.run

    def watched(self, hidden_states, topk_weights, topk_ids, **options):
        seen.append((hidden_states, topk_weights))
        run(self, hidden_states, topk_weights, topk_ids, **options)

    monkeypatch.setattr(ReversedExperts, "run", watched)
    call = (layer.hidden, weights, layer.ids)
    got = FusedExperts(layer.weights, backend="reverses")(*call, apply_router_weight_on_input=True)
    want = FusedExperts(layer.weights)(*call, apply_router_weight_on_input=True)
    assert got.dtype == dtype
    assert torch.equal(got, want)
    x, ones = seen[0]
    assert torch.equal(x, layer.hidden.float() * weights)
    assert (ones == 1).all()
