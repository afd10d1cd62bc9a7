"""Hidden states that come quantized, and scales of activations that come with the weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize, get_format
from moequant.runtime import (
    ExpertWeights,
    FusedExperts,
    backends,
    fused_experts,
    pack_experts,
)
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import Backend, PackedExperts
from moequant.runtime.packing import workload_of

ANYWHERE = ["torch_reference", "naive_batched"]
QUANTIZING = ["fp8_block", "w4a8", "fp8_channel", "fp8_tensor"]


def weights_of(layer, format):
    fmt = get_format(format)
    return ExpertWeights(**{name: fmt.quantize(w) for name, w in layer.source.items()})


def static(weights, gate_up=0.01, down=0.005):
    return dataclasses.replace(
        weights,
        gate_up_input_scale=torch.tensor([gate_up]),
        down_input_scale=torch.tensor([down]),
    )


@pytest.fixture(params=QUANTIZING)
def case(request, layers):
    """A layer, experts in a format that quantizes activations, and hidden states quantized so."""
    layer = layers.make()
    weights = weights_of(layer, request.param)
    return (
        layer,
        weights,
        quantize_activations(layer.hidden, workload_of(weights, "format").activations),
    )


@pytest.mark.parametrize("backend", ANYWHERE)
def test_quantized_outside_or_inside_gives_the_same_bits(case, backend):
    layer, weights, x = case
    module = FusedExperts(weights, backend=backend)
    want = module(*layer.call).bfloat16()
    got = module(x.qdata, *layer.call[1:], hidden_scale=x.scale)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    module.max_tokens = 4
    assert torch.equal(module(x.qdata, *layer.call[1:], hidden_scale=x.scale), want)
    packed = pack_experts(weights, backend=backend)
    alone = fused_experts(x.qdata, packed, layer.topk_weights, layer.ids, hidden_scale=x.scale)
    assert torch.equal(alone, want)


@pytest.mark.parametrize("backend", ANYWHERE)
def test_a_router_weight_on_the_input_is_part_of_its_scale(layers, backend):
    layer = layers.make(T=1)
    layer.topk_weights.copy_(torch.linspace(0.1, 2, 13)[:, None])
    x = quantize_activations(layer.hidden, "fp8_group128")
    module = FusedExperts(layer.weights, backend=backend)
    got = module(
        x.qdata,
        layer.topk_weights,
        layer.ids,
        hidden_scale=x.scale,
        apply_router_weight_on_input=True,
    )
    ones, scale = torch.ones_like(layer.topk_weights), x.scale * layer.topk_weights
    assert torch.equal(got, module(x.qdata, ones, layer.ids, hidden_scale=scale))


def test_compiled_calls_take_them_too(case):
    layer, weights, x = case
    module = FusedExperts(weights)
    call = (x.qdata, *layer.call[1:])
    want = module(*call, hidden_scale=x.scale)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*call, hidden_scale=x.scale), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_scale": None}, "float8_e4m3fn and there is no hidden_scale; give its scales"),
        ({"hidden_scale": torch.ones(13, 1)}, r"\[13, 1\], but for fp8_group128 .* \[13, 2\]"),
        ({"hidden_scale": torch.ones(12, 2)}, r"hidden_scale is \[12, 2\]"),
        ({"hidden_scale": torch.ones(13, 2).half()}, "hidden_scale is torch.float16"),
        ({"hidden_scale": torch.ones(13, 2, device="meta")}, "hidden_scale is on meta"),
        ({"activations": "none"}, "take activations that are not quantized; give hidden_states in"),
    ],
)
def test_scales_that_do_not_fit_are_refused(layers, change, message):
    layer = layers.make()
    x = quantize_activations(layer.hidden, "fp8_group128")
    with pytest.raises(UnsupportedError, match=message):
        FusedExperts(layer.weights)(x.qdata, *layer.call[1:], **{"hidden_scale": x.scale, **change})


def test_a_scale_wants_codes_and_weights_that_quantize(layers):
    layer = layers.make()
    advice = r"hidden_states is torch\.float32; leave hidden_scale out, .*float8_e4m3fn"
    with pytest.raises(UnsupportedError, match=advice):
        FusedExperts(layer.weights)(*layer.call, hidden_scale=torch.ones(13, 2))
    layer = layers.make("mxfp4")
    x = quantize_activations(layer.hidden, "fp8_group128")
    with pytest.raises(UnsupportedError, match="not quantized; give hidden_states in bfloat16"):
        FusedExperts(layer.weights)(x.qdata, *layer.call[1:], hidden_scale=x.scale)


class TakesExperts(PackedExperts):
    """Keeps what it was given."""

    def run(self, hidden_states, topk_weights, topk_ids, *, out, hidden_scale, **options):
        self.seen = hidden_states, topk_weights, hidden_scale
        out.zero_()


class TakesNoneExperts(TakesExperts):
    takes_quantized = False


class Takes(Backend):
    name = "takes"
    default_on = ()
    makes = TakesExperts

    def supports(self, workload):
        return None

    def load(self, tensors, workload):
        return self.makes(self, tensors, workload=workload)


class TakesNone(Takes):
    name = "takes_none"
    makes = TakesNoneExperts


def test_a_fused_backend_gets_them_with_their_scales(layers, monkeypatch):
    monkeypatch.setitem(backends.backends(), "takes", Takes())
    layer = layers.make(T=1)
    x = quantize_activations(layer.hidden, "fp8_group128")
    module = FusedExperts(layer.weights, backend="takes")
    call = (x.qdata, layer.topk_weights / 2, layer.ids)
    assert module(*call, hidden_scale=x.scale).dtype == torch.bfloat16
    codes, _, scale = module.packed().seen
    assert (codes, scale) == (x.qdata, x.scale)
    module(*call, hidden_scale=x.scale, apply_router_weight_on_input=True)
    _, ones, scale = module.packed().seen
    assert torch.equal(scale, x.scale * call[1])
    assert bool((ones == 1).all())


def test_a_fused_backend_that_takes_none_refuses_them(layers, monkeypatch):
    monkeypatch.setitem(backends.backends(), "takes_none", TakesNone())
    layer = layers.make()
    x = quantize_activations(layer.hidden, "fp8_group128")
    module = FusedExperts(layer.weights, backend="takes_none")
    with pytest.raises(UnsupportedError, match="'takes_none' does not take quantized hidden"):
        module(x.qdata, *layer.call[1:], hidden_scale=x.scale)


def test_static_scales_are_those_of_every_token():
    x = torch.tensor([[1.0, -0.3, 500.0], [0.0, 1e-9, torch.nan]])
    q = quantize_activations(x, "fp8_static", static_scale=torch.tensor([0.5]))
    assert q.scale.tolist() == [[0.5], [0.5]]
    # 0.6 lies between 0.5625 and 0.625, steps of 2**-4 there; 1000 is beyond 448.
    assert q.qdata[0].float().tolist() == [2.0, -0.625, 448.0]
    assert q.qdata[1, :2].float().tolist() == [0.0, 0.0]
    assert bool(q.qdata[1, 2].float().isnan())
    assert q.dequantize()[0].tolist() == [1.0, -0.3125, 224.0]


@pytest.mark.parametrize("backend", ANYWHERE)
def test_static_scales_feed_both_gemms(layers, backend):
    layer = layers.make()
    weights = static(weights_of(layer, "fp8_tensor"))
    got = FusedExperts(weights, backend=backend)(*layer.call).double()
    w = {name: decoded(q) for name, q in weights.projections().items()}

    def fed(x, scale):
        return ((x / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double()) * scale

    want = torch.zeros_like(got)
    # The float32 numbers 0.01 and 0.005, by which both sides divide.
    first, second = (s.double() for s in (weights.gate_up_input_scale, weights.down_input_scale))
    for m, x in enumerate(fed(layer.hidden.double(), first)):
        for e, weight in zip(layer.ids[m].tolist(), layer.topk_weights[m], strict=True):
            gate, up = w["gate"][e] @ x, w["up"][e] @ x
            h = fed(gate / (1 + torch.exp(-gate)) * up, second)
            want[m] += weight * (w["down"][e] @ h)
    # Of 5000 codes in the middle, few flip where a last bit decides, each by 2**-4 of itself.
    assert (got - want).norm() <= 5e-3 * want.norm()
    dynamic = FusedExperts(weights_of(layer, "fp8_tensor"), backend=backend)(*layer.call)
    assert (got - dynamic).norm() > 1e-3 * want.norm()


def decoded(q):
    return dequantize(q).double()


def test_of_scales_of_experts_the_largest_counts(layers):
    layer = layers.make()
    weights = weights_of(layer, "fp8_tensor")
    one = FusedExperts(static(weights, 0.02, 0.01))(*layer.call)
    per_expert = dataclasses.replace(
        weights,
        gate_up_input_scale=torch.tensor([0.001, 0.02, 0.001, 0.01, 0.003, 0.02]),
        down_input_scale=torch.tensor([0.01, 0.0, 0.001, 0.01, 0.003, 0.002]),
    )
    assert torch.equal(FusedExperts(per_expert)(*layer.call), one)


def test_static_scales_are_part_of_the_state_and_move_along(layers):
    layer = layers.make()
    module = FusedExperts(static(weights_of(layer, "fp8_tensor")))
    assert module.state_dict()["w13_input_scale"].tolist() == [pytest.approx(0.01)]
    assert module.packed().workload.activations == "fp8_static"
    assert module.to("meta").weights.down_input_scale.device.type == "meta"


def test_hidden_states_quantized_with_the_static_scale_give_the_same_bits(layers):
    layer = layers.make()
    weights = static(weights_of(layer, "fp8_tensor"))
    x = quantize_activations(layer.hidden, "fp8_static", static_scale=torch.tensor([0.01]))
    module = FusedExperts(weights)
    got = module(x.qdata, *layer.call[1:], hidden_scale=x.scale)
    assert torch.equal(got, module(*layer.call).bfloat16())


def test_activations_may_stay_as_they_are_beside_static_scales(layers):
    layer = layers.make()
    weights = weights_of(layer, "fp8_tensor")
    want = FusedExperts(weights, activations="none")(*layer.call)
    got = FusedExperts(static(weights), activations="none")(*layer.call)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("format", "changes", "error", "message"),
    [
        ("fp8_channel", {}, UnsupportedError, "only nvfp4 and fp8_tensor take static scales"),
        ("fp8_tensor", {"down_input_scale": None}, CheckpointError, "go together"),
        (
            "fp8_tensor",
            {"down_input_scale": torch.ones(5)},
            CheckpointError,
            r"down_input_scale is \[5\], but must be \[1\], or \[6\]",
        ),
        (
            "fp8_tensor",
            {"gate_up_input_scale": torch.ones(1).half()},
            CheckpointError,
            "gate_up_input_scale is torch.float16",
        ),
        (
            "fp8_tensor",
            {"gate_up_input_scale": torch.ones(1, device="meta")},
            UnsupportedError,
            "gate_up_input_scale on meta",
        ),
    ],
)
def test_static_scales_that_do_not_fit_are_refused(layers, format, changes, error, message):
    weights = weights_of(layers.make(), format)
    scales = {"gate_up_input_scale": torch.ones(1), "down_input_scale": torch.ones(1)}
    with pytest.raises(error, match=message):
        dataclasses.replace(weights, **{**scales, **changes})


@pytest.mark.parametrize("scale", [0.0, -0.01, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gate_up_input_scale", "down_input_scale"])
def test_a_static_scale_that_is_not_positive_is_refused_by_name(layers, name, scale):
    weights = static(weights_of(layers.make(), "fp8_tensor"))
    wrong = dataclasses.replace(weights, **{name: torch.tensor([0.0] * 5 + [scale])})
    with pytest.raises(CheckpointError, match=rf"{name}\[[05]\] is .*must be positive"):
        FusedExperts(wrong)


def test_a_static_scale_that_is_overwritten_is_looked_at_again(layers):
    layer = layers.make()
    experts = FusedExperts(static(weights_of(layer, "fp8_tensor")))
    experts(*layer.call)
    experts.load_state_dict({**experts.state_dict(), "w2_input_scale": torch.tensor([0.0])})
    with pytest.raises(CheckpointError, match=r"down_input_scale\[0\] is 0"):
        experts(*layer.call)
