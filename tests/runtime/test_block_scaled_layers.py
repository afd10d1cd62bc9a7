"""Layers of experts with activations in NVFP4, MXFP4 and MXFP8.

Weights and hidden states are small integers and the function between the GEMMs squares, so float32
holds every value between the GEMMs exactly, and what is expected is computed in float64.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from moequant.act_fn import RELU2
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize, get_format
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, torch_reference
from moequant.runtime.packing import scheme_of, workload_of

E, H, I, M, T = 4, 96, 64, 11, 2
SCALES = {"gate_up_input_scale": 2.0**-9, "down_input_scale": 2.0**-4}


def weights_of(format="nvfp4", *, static=False, H=H, I=I):
    g = torch.Generator().manual_seed(0)
    shapes = {"up": (E, I, H), "down": (E, H, I)}
    q = {}
    for name, shape in shapes.items():
        w = torch.randint(-2, 3, shape, generator=g).float()
        w[:, :, ::16] = 6  # so every format has the scale 1, and is exact
        q[name] = get_format(format).quantize(w)
    tensors = {}
    if static:
        tensors = {n: torch.tensor([1.0, 2, 4, 8]) * s for n, s in SCALES.items()}
    return ExpertWeights.of(q, RELU2, **tensors)


def call_of(H=H):
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(M, E, generator=g).topk(T).indices
    hidden = torch.randint(-3, 4, (M, H), generator=g).float()
    hidden[:, ::7] *= 0.25
    hidden[:, ::16] = 0
    return hidden, torch.full((M, T), 0.5), ids


def expected(weights, scheme):
    """The layer in float64; each token is quantized for each of its experts."""
    hidden, router, ids = call_of(weights.hidden)
    up, down = (dequantize(q).double() for q in (weights.up, weights.down))
    scales = weights.input_scales() if scheme == "nvfp4_static" else {}

    def quantized(row, name, e):
        static = scales[name][e : e + 1] if name in scales else None
        return quantize_activations(row.float(), scheme, static_scale=static).dequantize().double()

    y = torch.zeros(M, weights.hidden, dtype=torch.float64)
    for m in range(M):
        for t in range(T):
            e = int(ids[m, t])
            x = quantized(hidden[m : m + 1], "gate_up_input_scale", e)
            h = quantized((x @ up[e].T).clamp(min=0) ** 2, "down_input_scale", e)
            y[m] += router[m, t] * (h @ down[e].T)[0]
    return y


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "bf16"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])
def test_any_weights_take_them_before_both_gemms(format, scheme):
    weights = weights_of(format)
    experts = FusedExperts(weights, activations=scheme)
    assert experts.chosen_backend() == "torch_reference"
    got = experts(*call_of())
    want = expected(weights, scheme)
    # With powers of two for scales all is exact; a token's global scale rounds.
    tolerance = 1e-5 if scheme == "nvfp4" else 0
    assert (got - want).norm() <= tolerance * want.norm()
    assert (got - experts(*call_of(), activations="none")).norm() > 0.01 * want.norm()


@pytest.mark.parametrize("activations", ["format", "nvfp4"])
def test_static_global_scales_are_each_expert_s_own(activations):
    weights = weights_of(static=True)
    experts = FusedExperts(weights, activations=activations)
    assert experts.packed().workload.activations == "nvfp4_static"
    got = experts(*call_of())
    assert torch.equal(got.double(), expected(weights, "nvfp4_static"))
    # Another global scale rounds the scales of groups, and so the codes, differently.
    one = dataclasses.replace(weights, **{n: t[:1] for n, t in weights.input_scales().items()})
    assert not torch.equal(FusedExperts(one, activations=activations)(*call_of()), got)


def test_static_scales_move_with_the_state_and_are_looked_at_again():
    experts = FusedExperts(weights_of(static=True))
    want = experts(*call_of())
    assert {"w13_input_scale", "w2_input_scale"} <= experts.state_dict().keys()
    assert "activations=nvfp4_static" in repr(experts)
    experts.activations = "none"
    assert "activations=none" in repr(experts)
    experts.activations = "no_such_scheme"
    assert "activations=no_such_scheme" in repr(experts)
    experts.activations = "format"
    other = FusedExperts(weights_of(static=True))
    other.w2_input_scale.mul_(2)
    other.load_state_dict(experts.state_dict())
    assert torch.equal(other(*call_of()), want)
    experts.w2_input_scale[2] = 0
    with pytest.raises(CheckpointError, match=r"down_input_scale\[2\] is 0, but each must be from"):
        experts(*call_of())


@pytest.mark.parametrize("value", [0.0, -1.0, 2.0**-118, 2.0**118, torch.inf, torch.nan])
def test_a_global_scale_out_of_range_is_refused_by_name(value):
    weights = weights_of(static=True)
    scale = weights.gate_up_input_scale.clone()
    scale[1] = value
    with pytest.raises(CheckpointError, match=r"gate_up_input_scale\[1\] is .*calibrate again"):
        FusedExperts(dataclasses.replace(weights, gate_up_input_scale=scale))


@pytest.mark.parametrize(
    ("format", "activations", "static", "scheme"),
    [
        ("nvfp4", "format", False, "none"),
        ("nvfp4", "format", True, "nvfp4_static"),
        ("nvfp4", "nvfp4", False, "nvfp4"),
        ("nvfp4", "nvfp4", True, "nvfp4_static"),
        ("nvfp4", "none", True, "none"),
        ("mxfp4", "nvfp4", False, "nvfp4"),
        ("mxfp4", "mxfp4", False, "mxfp4"),
        ("mxfp8", "format", False, "none"),
        ("fp8_tensor", "format", True, "fp8_static"),
        ("fp8_tensor", "nvfp4", True, "nvfp4"),  # its static scales are FP8's
    ],
)
def test_what_callers_ask_for_and_what_came_with_the_weights_say_the_scheme(
    format, activations, static, scheme
):
    assert scheme_of(format, activations, static=static) == scheme


@pytest.mark.parametrize("activations", ["nvfp4", "mxfp4", "mxfp8"])
def test_the_other_backends_refuse_them_in_their_words(activations):
    workload = workload_of(weights_of(), activations)
    for name, backend in REGISTRY.items():
        assert (backend.supports(workload) is None) == (name == "torch_reference")
    for name in ("naive_batched", "triton"):
        reason = re.escape(str(REGISTRY[name].supports(workload)))
        said = f"'{name}' does not run .*: {reason}; torch_reference would run it"
        with pytest.raises(UnsupportedError, match=said):
            pack_experts(weights_of(), backend=name, activations=activations)


def test_sizes_that_are_no_whole_groups_are_refused():
    weights = weights_of("bf16", I=48)
    with pytest.raises(
        UnsupportedError, match="needs H and I in multiples of 32 for activations in mxfp4"
    ):
        FusedExperts(weights, activations="mxfp4")
    assert FusedExperts(weights, activations="nvfp4")(*call_of()).shape == (M, H)


def test_hidden_states_that_come_quantized_are_refused():
    hidden, *rest = call_of()
    x = quantize_activations(hidden, "fp8_token")
    experts = FusedExperts(weights_of(), activations="mxfp8")
    with pytest.raises(UnsupportedError, match="quantize hidden states to mxfp8 themselves"):
        experts(x.qdata, *rest, hidden_scale=x.scale)


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_static", "mxfp4", "mxfp8"])
def test_within_a_capture_every_expert_computes_all_tokens_to_the_same_bits(monkeypatch, scheme):
    weights = weights_of(static=scheme == "nvfp4_static")
    experts = FusedExperts(weights, activations=scheme.removesuffix("_static"))
    want = experts(*call_of())
    monkeypatch.setattr(torch_reference, "capturing", lambda device: True)
    assert torch.equal(experts(*call_of()), want)
