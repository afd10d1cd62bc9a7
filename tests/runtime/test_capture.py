"""Standard and batched backends within the capture of a CUDA graph, where nothing is read back.

On a CPU nothing can be captured, so it is said to be: the numbers are compared there, and on the
meta device, which holds none, whatever reads one fails. A GPU captures.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moequant.benchmarks.layers import random_experts, random_inputs
from moequant.benchmarks.shapes import LayerShape
from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, experts, pack_experts
from moequant.runtime.backends import naive_batched, routed, torch_reference
from moequant.runtime.backends.naive_batched import NaiveBatchedExperts
from moequant.runtime.call import run_experts
from moequant.runtime.capture import capturing

ANYWHERE = ["torch_reference", "naive_batched"]
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@pytest.mark.parametrize("current", [0, 1])
def test_the_stream_of_the_device_is_asked_and_not_that_of_the_current_one(monkeypatch, current):
    devices = [current]

    @contextmanager
    def device(other):
        devices.append(other.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: devices[-1] == 1)
    assert capturing(torch.device("cuda:1"))
    assert not capturing(torch.device("cuda:0"))
    assert capturing(torch.device("cuda")) == (current == 1)
    assert not capturing(torch.device("cpu"))
    assert devices == [current]


@pytest.fixture
def captured(monkeypatch):
    for module in (experts, routed, naive_batched, torch_reference):
        monkeypatch.setattr(module, "capturing", lambda device: True)


class NoCopyFromHost(TorchFunctionMode):
    """Refuses to make a tensor of Python numbers, which is a copy that waits for the device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("activations", ["format", "fp8_tensor", "none"])
@pytest.mark.parametrize("backend", ANYWHERE)
def test_nothing_is_read_on_the_host(
    layers, every_format, backend, activations, captured, monkeypatch
):
    layer = layers.make(every_format)
    weights = layer.weights.replace({n: t.to("meta") for n, t in layer.weights.tensors().items()})
    monkeypatch.setattr(torch_reference, "why_not_reference", lambda workload: None)
    monkeypatch.setattr(naive_batched, "why_not_reference", lambda workload: None)
    packed = pack_experts(weights, backend=backend, activations=activations)
    call = [t.to("meta") for t in layer.call]
    with NoCopyFromHost():
        y = run_experts(packed, *call, expert_map=torch.arange(6, device="meta"))
    assert y.shape == layer.hidden.shape


def test_outside_of_a_capture_something_is(layers, monkeypatch):
    # What the test above relies on.
    layer = layers.make()
    weights = layer.weights.replace({n: t.to("meta") for n, t in layer.weights.tensors().items()})
    monkeypatch.setattr(torch_reference, "why_not_reference", lambda workload: None)
    packed = pack_experts(weights, backend="torch_reference", activations="none")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        run_experts(packed, *(t.to("meta") for t in layer.call))
    with pytest.raises(AssertionError, match="tensor"), NoCopyFromHost():
        torch.tensor([1.0], device="meta")


@pytest.mark.parametrize("backend", ANYWHERE)
def test_the_result_is_the_same_but_for_the_order_of_sums(
    layers, every_format, backend, monkeypatch, request
):
    layer = layers.make(every_format)
    module = FusedExperts(layer.weights, backend=backend, activations="none")
    layer.ids[3:6, 1] = -1
    want = module(*layer.call)
    request.getfixturevalue("captured")
    got = module(*layer.call)
    # Sums of at most 256 terms of float32, as a random walk: 16 * 2**-24 of the norm for each GEMM.
    assert (got - want).norm() <= 3 * 16 * 2.0**-24 * want.norm()


@pytest.mark.parametrize("backend", ANYWHERE)
def test_ids_and_indices_out_of_range_contribute_nothing(layers, backend, captured):
    layer = layers.make()
    module = FusedExperts(layer.weights, backend=backend)
    absent = layer.ids == 2
    want = module(layer.hidden, layer.topk_weights, layer.ids.masked_fill(absent, -1))
    for far in (6, -2, 1 << 40):
        ids = layer.ids.masked_fill(absent, far)
        assert torch.equal(module(layer.hidden, layer.topk_weights, ids), want)
    here = torch.tensor([0, 1, 77, 3, 4, 5])
    assert torch.equal(module(*layer.call, expert_map=here), want)


@pytest.mark.parametrize("M", [1, 13, 40, 100])
def test_a_call_before_the_capture_runs_the_kernels_of_the_captured_one(
    layers, monkeypatch, request, M
):
    # Portable kernels are compiled for tiles of 16, 32 or 64 rows, by the room of a batch.
    from moequant.kernels.portable.portable_fused import TILE_ROWS

    rooms = []
    run = NaiveBatchedExperts._run_batches
    monkeypatch.setattr(
        NaiveBatchedExperts,
        "_run_batches",
        lambda self, t: (rooms.append(t.qdata.shape[1]), run(self, t))[1],
    )
    layer = layers.make(M=M)
    module = FusedExperts(layer.weights, backend="naive_batched")
    module(*layer.call)
    request.getfixturevalue("captured")
    module(*layer.call)
    tiles = [next((rows for rows in TILE_ROWS if rows >= room), TILE_ROWS[-1]) for room in rooms]
    assert tiles[0] == tiles[1]
    assert rooms[1] == M


def test_a_token_may_name_an_expert_twice_outside_of_a_capture(layers):
    layer = layers.make(M=3)
    layer.ids[:] = 2
    want = FusedExperts(layer.weights, backend="torch_reference")(*layer.call)
    assert torch.equal(FusedExperts(layer.weights, backend="naive_batched")(*layer.call), want)


def test_a_token_may_name_an_expert_twice_within_a_capture(layers, request):
    layer = layers.make(M=9)
    layer.ids[:] = 2
    layer.ids[4:, 0] = 1
    layer.ids[7, :] = -1
    module = FusedExperts(layer.weights, backend="naive_batched", activations="none")
    want = module(*layer.call)
    request.getfixturevalue("captured")
    got = module(*layer.call)
    assert (got[7] == 0).all()
    # As above. And weights are added before they are multiplied: of the magnitudes of the three
    # terms, which add up to less than twice the norm, three roundings on either side.
    assert (got - want).norm() <= (3 * 16 + 2 * 6) * 2.0**-24 * want.norm()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_capture_refuses_the_first_call_of_what_compiles(layers, request, compiles, monkeypatch):
    monkeypatch.setattr(NaiveBatchedExperts, "compiles", compiles)
    layer = layers.make()
    called, new = (FusedExperts(layer.weights, backend="naive_batched") for _ in range(2))
    called(*layer.call)
    request.getfixturevalue("captured")
    called(*layer.call)
    said = "'naive_batched' compiles kernels in its first call, .* call the experts once before"
    with pytest.raises(UnsupportedError, match=said) if compiles else nullcontext():
        new(*layer.call)


def test_tokens_that_reach_no_expert_do_not_spread_what_they_hold(layers, captured):
    layer = layers.make()
    layer.ids[4] = -1
    module = FusedExperts(layer.weights, backend="torch_reference")
    clean = module(*layer.call)
    layer.hidden[4] = torch.nan
    assert torch.equal(module(*layer.call), clean)


@pytest.mark.gpu
@pytest.mark.skipif(not HERE, reason="needs a CUDA device of SM80 or newer")
@pytest.mark.parametrize("backend", [*ANYWHERE, "triton_batched"])
def test_a_captured_call_is_replayed_on_new_inputs(every_format, backend):
    device = torch.device("cuda", 0)
    shape = LayerShape(experts=8, hidden=512, intermediate=256, topk=3)
    module = FusedExperts(random_experts(shape, every_format, device), backend=backend)
    static = random_inputs(shape, 40, device, 0).arguments
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for seed in (1, 2):
        hidden, topk_weights, ids = random_inputs(shape, 40, device, seed).arguments
        absent = torch.rand(ids.shape, device="cuda") < 0.2
        want = module(hidden, topk_weights, ids.masked_fill(absent, -1))
        new = (hidden, topk_weights, ids.masked_fill(absent, 1 << 20))
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        graph.replay()
        # Other shapes of GEMM, so other orders of sums: 2e-6 of the norm, which flips few of the
        # codes in the middle (see test_triton_backend.py); and bfloat16 outputs, an ulp apart.
        assert (out.float() - want.float()).norm() <= 5e-3 * want.float().norm()
