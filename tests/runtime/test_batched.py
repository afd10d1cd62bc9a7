"""Batched experts: prepare, the backends, finalize. On a CPU, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError
from moequant.formats import RUNNABLE, get_format
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, BatchedExperts
from moequant.runtime.batched import (
    OVERFLOW,
    BatchedTokens,
    expert_range,
    finalize_batched,
    largest_batch,
    prepare_batched,
)
from moequant.runtime.routing import Routing, route

CUDA = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not CUDA, reason="needs a CUDA device of SM80 or newer"),
        ],
    ),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)

DYNAMIC = ["fp8_group128", "fp8_token", "fp8_tensor", "none"]  # whose scales are computed


def on_gpu(test):
    test = pytest.mark.skipif(not CUDA, reason="needs a CUDA device of SM80 or newer")(test)
    return pytest.mark.gpu(test)


def routing_of(ids, device="cpu"):
    expert = torch.tensor(ids, device=device)
    weight = torch.arange(1, expert.numel() + 1, device=device).reshape(expert.shape).float()
    return Routing(expert=expert, weight=weight.masked_fill(expert < 0, 0))


IDS = [[2, 0], [0, -1], [2, 1], [-1, -1], [0, 2]]


@on_every_device
def test_each_batch_holds_the_tokens_of_its_expert_in_order(device):
    x = torch.arange(5.0, device=device)[:, None] * torch.ones(1, 8, device=device)
    tokens, places = prepare_batched(
        x, routing_of(IDS, device), experts=4, capacity=5, scheme="none"
    )
    assert tokens.counts.tolist() == [3, 1, 3, 0]
    assert tokens.counts.dtype == torch.int32
    assert tokens.qdata.shape == (4, 5, 8)
    assert tokens.qdata[0, :3, 0].tolist() == [0, 1, 4]
    assert tokens.qdata[1, :1, 0].tolist() == [2]
    assert tokens.qdata[2, :3, 0].tolist() == [0, 2, 4]
    assert places.of_pairs.tolist() == [[10, 0], [1, -1], [11, 5], [-1, -1], [2, 12]]


@on_every_device
@pytest.mark.parametrize("scheme", DYNAMIC)
def test_tokens_are_quantized_as_they_would_be_alone(device, scheme):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 200, generator=g).bfloat16().to(device)
    tokens, places = prepare_batched(
        x, routing_of(IDS, device), experts=3, capacity=7, scheme=scheme
    )
    alone = quantize_activations(x, scheme)
    assert tokens.scheme == scheme
    for m, t in (places.of_pairs >= 0).nonzero().tolist():
        e, i = divmod(int(places.of_pairs[m, t]), 7)
        assert torch.equal(tokens.qdata[e, i].view(torch.uint8), alone.qdata[m].view(torch.uint8))
        if scheme != "none":
            assert torch.equal(tokens.scale[e, i], alone.scale[m])


@on_every_device
def test_finalize_weights_and_adds_pair_after_pair(device):
    routing = routing_of(IDS, device)
    _, places = prepare_batched(
        torch.zeros(5, 4, device=device), routing, experts=3, capacity=5, scheme="none"
    )
    rows = torch.full((3, 5, 4), torch.nan, device=device)
    rows.view(15, 4)[places.of_pairs[places.of_pairs >= 0]] = (
        10.0 ** torch.arange(7, device=device)
    )[:, None]
    got = finalize_batched(rows, routing, places)
    # Weights are 1 to 10 by pair; the value of the k-th pair that has an expert is 10**k.
    assert got[:, 0].tolist() == [1 + 20, 300, 5000 + 60000, 0, 900000 + 10000000]
    assert got.dtype == torch.float32


def test_the_largest_batch_is_capacity_enough():
    routing = routing_of(IDS)
    assert largest_batch(routing, 4) == 3
    prepare_batched(torch.zeros(5, 4), routing, experts=4, capacity=3, scheme="none")
    assert largest_batch(routing_of([[-1, -1]]), 4) == 0
    assert largest_batch(routing_of([[-1]]), 0) == 0


def test_an_expert_that_overflows_is_named_on_a_cpu():
    with pytest.raises(UnsupportedError, match=r"expert 0 has 3 tokens, but the capacity is 2"):
        prepare_batched(torch.zeros(5, 4), routing_of(IDS), experts=3, capacity=2, scheme="none")


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("scheme", DYNAMIC)
def test_on_a_gpu_its_token_becomes_nan_and_nothing_waits(scheme):
    routing = routing_of(IDS, "cuda")
    x = torch.ones(5, 4, device="cuda")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        tokens, places = prepare_batched(x, routing, experts=3, capacity=2, scheme=scheme)
        got = finalize_batched(tokens.qdata.float(), routing, places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.counts.tolist() == [2, 1, 2]
    assert places.of_pairs.tolist() == [[4, 0], [1, -1], [5, 2], [-1, -1], [OVERFLOW, OVERFLOW]]
    assert got.isnan().all(1).tolist() == [False, False, False, False, True]


@on_every_device
def test_no_token_and_no_expert(device):
    for M, E in ((0, 3), (2, 0)):
        routing = (
            routing_of([[-1, -1]] * M, device)
            if M
            else Routing(
                expert=torch.empty(0, 2, dtype=torch.int64, device=device),
                weight=torch.empty(0, 2, device=device),
            )
        )
        x = torch.ones(M, 8, device=device)
        tokens, places = prepare_batched(x, routing, experts=E, capacity=M, scheme="fp8_token")
        assert tokens.qdata.shape == (E, M, 8)
        rows = torch.zeros(E, M, 8, device=device)
        assert torch.equal(finalize_batched(rows, routing, places), torch.zeros_like(x))


def test_ranks_share_the_experts_one_behind_the_other():
    assert expert_range(6, 1, 3).tolist() == [-1, -1, 0, 1, -1, -1]
    assert expert_range(2, 0, 1).tolist() == [0, 1]
    for rank, ranks in ((3, 3), (0, 4)):
        with pytest.raises(UnsupportedError, match="ranks must divide the experts"):
            expert_range(6, rank, ranks)
    for rank, ranks in ((-1, 3), (0, 0)):
        with pytest.raises(UnsupportedError, match="must be a whole number, at least"):
            expert_range(6, rank, ranks)


def test_what_the_ranks_compute_adds_up(layers):
    layer = layers.make("mxfp4")
    whole = FusedExperts(layer.weights, backend="naive_batched")(*layer.call)
    total = torch.zeros_like(whole)
    for rank in range(3):
        here = slice(2 * rank, 2 * rank + 2)
        mine = {
            name: q.map(lambda t, here=here: t[here], torch.Size((2, *q.shape[1:])))
            for name, q in layer.weights.projections().items()
        }
        total += FusedExperts(
            ExpertWeights(**mine), backend="naive_batched", expert_map=expert_range(6, rank, 3)
        )(*layer.call)
    # Float32 sums of three terms in another order.
    assert (total - whole).norm() <= 1e-6 * whole.norm()


@pytest.mark.parametrize("format", RUNNABLE)
def test_naive_batched_gives_the_bits_of_the_reference(layers, format):
    layer = layers.make("fp8_block")
    weights = layer.weights
    if format != "fp8_block":
        fmt = get_format(format)
        parts = {n: fmt.quantize(w) for n, w in layer.source.items()}
        weights = type(weights)(**parts)
    want = FusedExperts(weights, backend="torch_reference")(*layer.call)
    got = FusedExperts(weights, backend="naive_batched")(*layer.call)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32])
def test_batches_take_every_call_that_the_reference_takes(layers, dtype, router):
    layer = layers.make("w4a8", T=1, dtype=dtype)
    ids, topk_weights = layer.ids.clone(), layer.topk_weights.to(router)
    ids[2:5] = -1
    here = torch.tensor([1, -1, 0, 5, -1, 2])
    want, got = (
        FusedExperts(layer.weights, backend=name) for name in ("torch_reference", "naive_batched")
    )
    for M in (0, 1, 13):
        call = layer.hidden[:M], topk_weights[:M], ids[:M]
        for expert_map in (None, here):
            for on_input in (False, True):
                options = {"expert_map": expert_map, "apply_router_weight_on_input": on_input}
                assert torch.equal(got(*call, **options), want(*call, **options))


@pytest.mark.parametrize("act_fn", [SWIGLUOAI, RELU2, ActFn(name="gelu", limit=0.5)], ids=str)
def test_batches_take_every_function_and_biases(layers, act_fn):
    layer = layers.make()
    w = layer.weights
    weights = replace(
        w,
        gate=w.gate if act_fn.gated else None,
        act_fn=act_fn,
        up_bias=layer.hidden[:6, :128].contiguous(),
        down_bias=layer.hidden[6:12].contiguous(),
    )
    want, got = (
        FusedExperts(weights, backend=name) for name in ("torch_reference", "naive_batched")
    )
    assert torch.equal(got(*layer.call), want(*layer.call))


def test_naive_batched_looks_at_no_row_beyond_the_counts(layers):
    weights = layers.make("nvfp4").weights
    x = torch.randn(6, 4, 256, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([4, 0, 1, 2, 3, 0], dtype=torch.int32)
    naive = pack_experts(weights, backend="naive_batched", activations="none")
    tokens = BatchedTokens(scheme="none", qdata=x, scale=None, counts=counts)
    want = naive.run_batches(tokens)
    x[torch.arange(4)[None, :] >= counts[:, None]] = torch.nan
    assert torch.equal(naive.run_batches(tokens), want)
    assert not want[1].any()


@pytest.mark.parametrize(
    ("qdata", "counts", "message"),
    [
        ([5, 4, 256], [1] * 5, r"qdata is torch.float32 \[5, 4, 256\], but .* \[6, 4, 256\]"),
        ([7, 4, 256], [1] * 7, r"qdata is torch.float32 \[7, 4, 256\], but .* \[6, 4, 256\]"),
        ([6, 4, 256], [1] * 5, r"counts is torch.int32 \[5\], but .* \[6\]"),
        ([6, 4, 256], [0, 4, 5, 0, 0, 0], r"expert 2 has 5 tokens, but the capacity is 4"),
        ([6, 4, 256], [0, 0, 0, -1, 0, 0], r"counts has -1, but must be at least 0"),
    ],
)
def test_batches_that_do_not_fit_the_experts_are_refused(layers, qdata, counts, message):
    naive = pack_experts(layers.make("nvfp4").weights, backend="naive_batched", activations="none")
    tokens = BatchedTokens(
        scheme="none",
        qdata=torch.zeros(qdata),
        scale=None,
        counts=torch.tensor(counts, dtype=torch.int32),
    )
    with pytest.raises(UnsupportedError, match=message):
        naive.run_batches(tokens)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("fp8_row", r"unknown activation scheme 'fp8_row'; use one of: fp8_group128, fp8_token"),
        ("", "unknown activation scheme ''"),
        ("fp8_static", "needs static_scale; give it, or use fp8_token"),
        ("mxfp4", "no batches of tokens in mxfp4; quantize them by one of: fp8_group128"),
    ],
)
def test_batches_are_not_quantized_by_an_unknown_scheme_or_without_its_scale(scheme, message):
    with pytest.raises(UnsupportedError, match=message):
        prepare_batched(torch.zeros(5, 32), routing_of(IDS), experts=3, capacity=5, scheme=scheme)


@on_gpu
@pytest.mark.parametrize("activations", ["format", "none", "fp8_tensor"])
@pytest.mark.parametrize("format", RUNNABLE)
def test_triton_batched_computes_what_naive_batched_does(format, activations):
    g = torch.Generator("cuda").manual_seed(0)
    sizes = {"gate": (8, 256, 512), "up": (8, 256, 512), "down": (8, 512, 256)}
    fmt = get_format(format)
    parts = {
        n: fmt.quantize(torch.randn(size, generator=g, device="cuda") * size[2] ** -0.5)
        for n, size in sizes.items()
    }
    weights = ExpertWeights(**parts)
    scheme = fmt.activations if activations == "format" else activations
    hidden = torch.randn(90, 512, generator=g, device="cuda").bfloat16()
    topk_weights, ids = torch.rand(90, 8, generator=g, device="cuda").topk(3)
    ids[5:20, 0] = -1
    routing = route(topk_weights, ids, experts=8)
    tokens, places = prepare_batched(hidden, routing, experts=8, capacity=90, scheme=scheme)
    beyond = torch.arange(90, device="cuda")[None, :] >= tokens.counts[:, None]
    if tokens.scale is None:
        tokens.qdata[beyond] = torch.nan
    else:
        tokens.scale[beyond] = torch.nan
    got, want = (
        finalize_batched(
            pack_experts(weights, backend=name, activations=activations).run_batches(tokens),
            routing,
            places,
        )
        for name in ("triton_batched", "naive_batched")
    )
    # As in test_triton_backend.py: bfloat16 between the GEMMs and in the rows, and codes that flip.
    assert (got - want).norm() <= (4e-3 if scheme == "none" else 9e-3) * want.norm()


def test_a_batched_backend_runs_when_it_is_named(layers):
    layer = layers.make()
    assert FusedExperts(layer.weights, backend="naive_batched").chosen_backend() == "naive_batched"
    assert FusedExperts(layer.weights).chosen_backend() == "torch_reference"
    assert route(layer.topk_weights, layer.ids, experts=6).expert.shape == layer.ids.shape


def test_experts_that_run_no_batches_say_which_backends_do(layers):
    packed = pack_experts(layers.make().weights, backend="torch_reference")
    said = "'torch_reference' does not run batches of tokens; .* ends with _batched, such as naive_"
    with pytest.raises(UnsupportedError, match=said):
        packed.run_batches(None)
    batched = {
        n for n, b in REGISTRY.items() if issubclass(getattr(b, "experts", object), BatchedExperts)
    }
    assert batched == {name for name in REGISTRY if name.endswith("_batched")}


def test_rows_of_cut_batches_are_refused_with_places_of_whole_ones():
    routing = routing_of(IDS)
    _, places = prepare_batched(torch.zeros(5, 4), routing, experts=3, capacity=5, scheme="none")
    with pytest.raises(
        UnsupportedError, match=r"E = 3 and C = 5; prepare .* experts=3 and capacity=3"
    ):
        finalize_batched(torch.zeros(3, 3, 4), routing, places)
    with pytest.raises(UnsupportedError, match=r"E = 3 and C = 5; prepare .* experts=2"):
        finalize_batched(torch.zeros(2, 5, 4), routing, places)
    with pytest.raises(UnsupportedError, match="places is Tensor, but must be Places"):
        finalize_batched(torch.zeros(3, 5, 4), routing, places.of_pairs)
    lost = replace(places, of_pairs=torch.full_like(places.of_pairs, OVERFLOW), capacity=0)
    assert finalize_batched(torch.zeros(3, 0, 4), routing, lost).isnan().all()
    other = Routing(expert=routing.expert[:2], weight=routing.weight[:2])
    with pytest.raises(UnsupportedError, match=r"of \[5, 2\] token-expert pairs, .* of \[2, 2\]"):
        finalize_batched(torch.zeros(3, 5, 4), other, places)


def test_autocast_is_off_in_batches(layers):
    layer = layers.make("nvfp4")
    packed = pack_experts(layer.weights, backend="naive_batched", activations="none")
    hidden, topk_weights, ids = layer.call
    E, M = packed.workload.experts, len(ids)
    routing = route(topk_weights, ids, experts=E)
    tokens, _ = prepare_batched(hidden, routing, experts=E, capacity=M, scheme="none")
    want = packed.run_batches(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = packed.run_batches(tokens)
    used = torch.arange(M)[None] < tokens.counts[:, None]
    assert torch.equal(got[used], want[used])


def ask_route(weights=((1.0, 1.0),), ids=((1, 2),), **options):
    route(torch.tensor(weights), torch.tensor(ids), **{"experts": 3, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ids": [[1.9, 2.9]]}, "topk_ids is torch.float32, but must be one of: torch.int32"),
        ({"ids": [[1]]}, r"topk_weights is \[1, 2\], but topk_ids \[1, 1\]"),
        ({"weights": [[1, 2]]}, "topk_weights is torch.int64"),
        ({"experts": "3"}, "experts is '3', but must be a whole number"),
        ({"expert_map": torch.tensor([0.5])}, "expert_map is torch.float32"),
        (
            {"expert_map": torch.tensor([]).int()},
            "are no experts, .*; expert_map has a length of 0",
        ),
    ],
)
def test_a_routing_of_other_arguments_is_refused_by_name(options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        ask_route(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ranks": 2.0}, "ranks is 2.0, but must be a whole number"),
        ({"rank": True}, "rank is True, but must be a whole number"),
        ({"device": "foo"}, "device 'foo' cannot be used"),
    ],
)
def test_a_share_of_experts_by_other_arguments_is_refused_by_name(options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        expert_range(8, **{"rank": 0, "ranks": 2, **options})


def static(scale):
    return {"scheme": "fp8_static", "static_scale": scale}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden": torch.zeros(5, 4).int()}, "hidden is torch.int32"),
        ({"hidden": torch.zeros(4)}, r"hidden is \[4\], but must be \[M, H\]"),
        ({"hidden": torch.zeros(2, 4)}, "the routing is of 5 tokens, but 2 were given"),
        ({"routing": None}, "routing is NoneType, but must be what .* returns"),
        ({"experts": 2}, "has expert 2, but experts is 2"),
        ({"capacity": 6.0}, "capacity is 6.0, but must be a whole number"),
        (static(torch.tensor([-1.0])), "static_scale is -1, but must be positive"),
        (static(torch.tensor([torch.nan])), "static_scale is nan, but must be positive"),
        (static(torch.ones(3)), r"static_scale is \[3\], but must be \[1\]"),
        (static(0.1), "static_scale is float, but must be a tensor"),
    ],
)
def test_batches_of_other_arguments_are_refused_by_name(options, reason):
    asked = {"hidden": torch.zeros(5, 4), "routing": routing_of(IDS), **options}
    settings = {"experts": 3, "capacity": 5, "scheme": "none"}
    with pytest.raises(UnsupportedError, match=reason):
        prepare_batched(asked.pop("hidden"), asked.pop("routing"), **settings | asked)
