"""Experts with other activation functions, and with biases, on the reference.

The oracle is a loop in float64. Float32 rounding errors of an inner product of K terms behave as a
random walk, about sqrt(K) u relative to the norm of the result (Higham and Mary, 2019); K is at
most 256 here and the functions in the middle double what they are given: 1e-5 is ten times that.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moequant.act_fn import RELU2, SWIGLUOAI, ActFn
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize
from moequant.runtime import FusedExperts

ACT_FNS = [
    ActFn(name="gelu"),
    ActFn(name="gelu_tanh"),
    SWIGLUOAI,
    ActFn(name="silu", limit=0.5),
    ActFn(name="relu2"),
    RELU2,
    ActFn(name="silu", gated=False),
    ActFn(name="swigluoai", alpha=0.75, beta=-0.25, limit=3.0),
    ActFn(name="swiglustep", limit=0.5),
    ActFn(name="situ", beta=0.5, linear_beta=2.0),
]


def variant(layer, act_fn, *, biases=True, dtype=torch.float32):
    """The experts of `layer` with another function, and with biases of the size of the sums."""
    w = layer.weights
    g = torch.Generator().manual_seed(1)
    shapes = {"gate_bias": w.intermediate, "up_bias": w.intermediate, "down_bias": w.hidden}
    made = {n: torch.randn(w.experts, size, generator=g).to(dtype) for n, size in shapes.items()}
    if not act_fn.gated:
        made.pop("gate_bias")
    return dataclasses.replace(
        w, gate=w.gate if act_fn.gated else None, act_fn=act_fn, **(made if biases else {})
    )


def in_float64(weights, layer):
    decoded = {n: dequantize(q).double() for n, q in weights.projections().items()}
    biases = {n: b.double() for n, b in weights.biases().items()}

    def project(name, e, x):
        return decoded[name][e] @ x + biases.get(f"{name}_bias", torch.zeros(weights.experts))[e]

    out = torch.zeros(layer.hidden.shape, dtype=torch.float64)
    for m, x in enumerate(layer.hidden.double()):
        for e, weight in zip(layer.ids[m].tolist(), layer.topk_weights[m], strict=True):
            gate = project("gate", e, x) if weights.act_fn.gated else None
            out[m] += weight * project("down", e, weights.act_fn(gate, project("up", e, x)))
    return out


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_the_reference_computes_every_function_with_and_without_biases(layers, act_fn, biases):
    layer = layers.make()
    weights = variant(layer, act_fn, biases=biases)
    result = FusedExperts(weights, activations="none")(*layer.call).double()
    expected = in_float64(weights, layer)
    # Each of 256 float32 additions is off by up to 2**-24 of a sum, at random: 1e-6 of the norm,
    # and 3e-6 after two GEMMs and the function between them, whose slope is at most 1.7. Three
    # times that.
    assert (result - expected).norm() < 1e-5 * expected.norm()


def test_biases_move_the_result(layers):
    layer = layers.make()
    with_biases = FusedExperts(variant(layer, SWIGLUOAI), activations="none")(*layer.call)
    without = FusedExperts(variant(layer, SWIGLUOAI, biases=False), activations="none")(*layer.call)
    assert (with_biases - without).norm() > 0.1 * without.norm()


def test_bfloat16_biases_are_read_as_they_are(layers):
    layer = layers.make()
    narrow = variant(layer, SWIGLUOAI, dtype=torch.bfloat16)
    wide = narrow.replace({n: t.float() if "bias" in n else t for n, t in narrow.tensors().items()})
    assert torch.equal(FusedExperts(narrow)(*layer.call), FusedExperts(wide)(*layer.call))


def test_biases_are_part_of_the_state_and_keep_their_dtype(layers):
    module = FusedExperts(variant(layers.make(), SWIGLUOAI)).half()
    assert module.state_dict()["w13_bias"].dtype == torch.float32
    assert module.state_dict()["w2_bias"] is not None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gate": None}, UnsupportedError, "silu and no gate"),
        ({"act_fn": RELU2}, UnsupportedError, "relu2, not gated and a gate"),
        (
            {"act_fn": RELU2, "gate": None, "gate_bias": torch.zeros(6, 128)},
            CheckpointError,
            "gate_bias is given, but there is no gate",
        ),
        ({"up_bias": torch.zeros(6, 256)}, CheckpointError, r"up_bias must be \[6, 128\]"),
        ({"down_bias": torch.zeros(6, 256).half()}, CheckpointError, "must be float32 or bf"),
        ({"down_bias": torch.zeros(6, 256, device="meta")}, UnsupportedError, "down_bias on meta"),
    ],
)
def test_parts_that_do_not_fit_are_refused(layers, changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(layers.make().weights, **changes)
