"""Activations in FP8 with one scale for all tokens: what shares it, and what does not.

Their numbers are compared with float64 in test_activations.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.formats import dequantize
from moequant.kernels import calls
from moequant.kernels.calls import MAX_PAIRS
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts
from moequant.runtime import experts as experts_module
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import naive_batched, routed, torch_reference
from moequant.runtime.backends.torch_reference import activate
from moequant.runtime.batched import prepare_batched
from moequant.runtime.routing import route

ANYWHERE = ["torch_reference", "naive_batched"]
FORMATS = ["fp8_channel", "fp8_tensor"]

every_backend = pytest.mark.parametrize("backend", ANYWHERE)


def experts(weights, backend="torch_reference", **options):
    return FusedExperts(weights, backend=backend, activations="fp8_tensor", **options)


def with_biases(layer, act_fn):
    g = torch.Generator().manual_seed(1)
    parts = {n: q for n, q in layer.weights.projections().items() if act_fn.gated or n != "gate"}
    biases = {f"{n}_bias": torch.randn(q.shape[:2], generator=g) for n, q in parts.items()}
    return ExpertWeights.of(parts, act_fn, **biases)


def test_all_rows_share_the_scale_of_the_largest_magnitude():
    x = torch.tensor([[1.0, -2.0], [0.5, 448.0], [-896.0, 3.0]])
    q = quantize_activations(x, "fp8_tensor")
    assert q.scale.tolist() == [[2.0], [2.0], [2.0]]
    assert q.qdata.float().tolist() == [[0.5, -1.0], [0.25, 224.0], [-448.0, 1.5]]
    small = quantize_activations(x / 1024, "fp8_tensor")
    assert torch.equal(small.qdata.view(torch.uint8), q.qdata.view(torch.uint8))


@pytest.mark.parametrize("shape", [(3, 5), (0, 5)])
def test_of_zeros_and_of_no_row_the_scale_is_one(shape):
    q = quantize_activations(torch.zeros(shape), "fp8_tensor")
    assert torch.equal(q.scale, torch.ones(shape[0], 1))
    assert not q.dequantize().any()


@pytest.mark.parametrize("amax", [2.0**-149, 1e-38, 1.0, 3e38])
def test_the_scale_of_any_magnitude_is_finite_and_positive(amax):
    q = quantize_activations(torch.tensor([[0.0, amax], [-amax / 2, 0.0]]), "fp8_tensor")
    assert (q.scale > 0).all()
    assert q.scale.isfinite().all()
    assert q.qdata.float().isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_makes_every_row_nan(poison):
    x = torch.ones(4, 8)
    x[2, 3] = poison
    assert quantize_activations(x, "fp8_tensor").dequantize().isnan().all()


@every_backend
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_or_inf_in_a_token_makes_every_result_nan(layers, backend, poison):
    layer = layers.make("fp8_tensor")
    layer.hidden[4, 7] = poison
    assert experts(layer.weights, backend)(*layer.call).isnan().all()


@every_backend
def test_zeros_give_zeros_and_with_biases_what_they_make(layers, backend):
    layer = layers.make("fp8_channel")
    zeros = torch.zeros_like(layer.hidden), layer.topk_weights, layer.ids
    assert not experts(layer.weights, backend)(*zeros).any()
    weights = with_biases(layer, SILU)
    want = FusedExperts(weights, activations="none")(*zeros)
    # A rounding to E4M3 between the GEMMs, 2**-4 of a value at most.
    assert want.any()
    assert (experts(weights, backend)(*zeros) - want).norm() <= 2.0**-4 * want.norm()


@every_backend
def test_without_tokens_or_experts_nothing_fails(layers, backend):
    layer = layers.make("fp8_tensor")
    module = experts(layer.weights, backend)
    hidden, topk_weights, ids = layer.call
    assert module(hidden[:0], topk_weights[:0], ids[:0]).shape == (0, 256)
    assert not module(hidden, topk_weights[:, :0], ids[:, :0]).any()
    assert not module(hidden, topk_weights, torch.full_like(ids, -1)).any()


def static(weights, hidden, ids):
    """The layer with static scales: those that the largest of all tokens and of all rows give."""
    x = quantize_activations(hidden, "fp8_tensor")
    rows = [
        activate(x.take(torch.tensor([m])), weights, ids[m, t], "fp8_tensor")
        for m, t in (ids >= 0).nonzero().tolist()
    ]
    h = quantize_activations(torch.cat(rows), "fp8_tensor")
    return replace(weights, gate_up_input_scale=x.scale[0], down_input_scale=h.scale[0])


def hard(layer):
    """A token of large numbers without an expert, and an expert without a token."""
    layer.hidden[3] *= 8
    layer.ids[3], layer.ids[5, 1] = -1, -1
    layer.ids[layer.ids == 2] = 4
    return layer.call


@every_backend
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
def test_all_tokens_share_a_scale_and_all_rows_that_are_computed(layers, backend, act_fn):
    """Rows of biases alone, as an expert's are padded with, would be larger: tokens cancel them."""
    layer = layers.make("fp8_tensor")
    call = hard(layer)
    weights = with_biases(layer, act_fn)
    biases = weights.biases()
    x = layer.hidden[:1].double()
    for name, bias in biases.items():
        if name != "down_bias":
            q = weights.projections()[name.removesuffix("_bias")]
            bias.copy_(-(dequantize(q).double() @ x[0]).float())
    layer.hidden[:] = layer.hidden[:1] * torch.linspace(0.9, 1.1, 13)[:, None]
    want = FusedExperts(static(weights, *call[::2]), backend=backend)(*call)
    assert torch.equal(experts(weights, backend)(*call), want)


@every_backend
def test_what_another_rank_computes_does_not_count(layers, backend):
    layer = layers.make("fp8_tensor")
    hidden, topk_weights, ids = hard(layer)
    here = torch.tensor([1, -1, 0, -1, 2, -1])
    mine = ExpertWeights(
        **{
            name: q.map(lambda t: t[:3], torch.Size((3, *q.shape[1:])))
            for name, q in layer.weights.projections().items()
        }
    )
    local = torch.where(ids >= 0, here[ids.clamp(min=0)], -1)
    want = experts(mine, backend)(hidden, topk_weights, local)
    assert torch.equal(experts(mine, backend)(hidden, topk_weights, ids, expert_map=here), want)
    same = FusedExperts(static(mine, hidden, local), backend=backend)
    assert torch.equal(same(hidden, topk_weights, local), want)


@every_backend
def test_a_token_changes_what_others_get(layers, backend):
    layer = layers.make("fp8_channel")
    module = experts(layer.weights, backend)
    before = module(*layer.call)
    layer.hidden[0] *= 1.5
    assert not torch.equal(module(*layer.call)[1:], before[1:])
    assert torch.equal(module(*layer.call), module(*layer.call))


@every_backend
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_outside_or_inside_gives_the_same_bits(layers, backend, format):
    layer = layers.make(format)
    x = quantize_activations(layer.hidden, "fp8_tensor")
    module = experts(layer.weights, backend)
    want = module(*layer.call).bfloat16()
    assert torch.equal(module(x.qdata, *layer.call[1:], hidden_scale=x.scale), want)


def test_a_router_weight_on_the_input_comes_before_the_scale(layers):
    layer = layers.make("fp8_tensor", T=1)
    layer.topk_weights.copy_(torch.linspace(0.1, 2, 13)[:, None])
    module = experts(layer.weights)
    got = module(*layer.call, apply_router_weight_on_input=True)
    weighted = layer.hidden * layer.topk_weights
    assert torch.equal(got, module(weighted, torch.ones(13, 1), layer.ids))


def test_static_scales_are_not_used(layers):
    layer = layers.make("fp8_tensor")
    ones = {f"{of}_input_scale": torch.ones(1) for of in ("gate_up", "down")}
    with_scales = replace(layer.weights, **ones)
    assert torch.equal(experts(with_scales)(*layer.call), experts(layer.weights)(*layer.call))


@every_backend
def test_each_part_of_a_call_has_its_scales(layers, backend):
    layer = layers.make("fp8_tensor")
    module = experts(layer.weights, backend)
    whole, first, second = (
        module(*(t[rows] for t in layer.call)) for rows in (slice(13), slice(7), slice(7, 13))
    )
    module.max_tokens = 7
    parts = module(*layer.call)
    assert torch.equal(parts, torch.cat([first, second]))
    assert not torch.equal(parts, whole)


def test_no_part_is_more_than_kernels_run_at_once(layers, monkeypatch):
    """Else they would split it again, each in another way."""
    layer = layers.make("fp8_tensor")
    module = experts(layer.weights)
    assert module.part_sizes(8192, 1) == module.part_sizes(8192, 8) == (8192,)
    assert module.part_sizes(8192, 10) == (4096,)
    assert 4096 * 10 <= MAX_PAIRS < 8192 * 10
    ran = []
    run = type(module.packed()).run
    monkeypatch.setattr(
        type(module.packed()),
        "run",
        lambda self, x, *rest, **options: (ran.append(len(x)), run(self, x, *rest, **options)),
    )
    monkeypatch.setattr(calls, "MAX_PAIRS", 20)
    module(*layer.call)
    assert ran == [5, 4, 4]


@pytest.mark.parametrize("format", FORMATS)
def test_batches_give_the_bits_of_the_reference(layers, format):
    layer = layers.make(format)
    want = experts(layer.weights)(*hard(layer))
    assert torch.equal(experts(layer.weights, "naive_batched")(*layer.call), want)


def test_rows_beyond_the_counts_of_batches_do_not_count(layers):
    layer = layers.make("fp8_tensor")
    hidden, topk_weights, ids = hard(layer)
    routing = route(topk_weights, ids, experts=6)
    naive = pack_experts(layer.weights, backend="naive_batched", activations="fp8_tensor")
    tokens, _ = prepare_batched(hidden, routing, experts=6, capacity=13, scheme="fp8_tensor")
    beyond = torch.arange(13)[None, :] >= tokens.counts[:, None]
    tokens.scale[beyond] = 1.0
    want = naive.run_batches(tokens)
    tokens.scale[beyond] = torch.nan
    got = naive.run_batches(tokens)
    assert torch.equal(got, want)
    assert got.isfinite().all()


@every_backend
def test_within_a_capture_the_result_is_the_same_but_for_the_order_of_sums(
    layers, backend, monkeypatch
):
    layer = layers.make("fp8_tensor")
    call, module = hard(layer), experts(layer.weights, backend)
    want = module(*call)
    for where in (experts_module, routed, naive_batched, torch_reference):
        monkeypatch.setattr(where, "capturing", lambda device: True)
    # An error of 1e-6 before it changes a code with probability 1e-6 / 2**-3.5, and by an ulp.
    # Of 4480 codes none changes, or one: 2**-3.5 / sqrt(4480) = 1.3e-3.
    assert (module(*call) - want).norm() <= 1.5e-3 * want.norm()
