"""The float64 evaluation itself: by hand, and its bounds against float32 at its worst."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from moequant.act_fn import ActFn
from moequant.verification import reference
from moequant.verification.reference import (
    FUNCTIONS,
    Bounded,
    activation,
    evaluate_layer,
    exact,
    project,
)


def silu(x):
    return x / (1 + math.exp(-x))


def generator():
    return torch.Generator().manual_seed(0)


def test_a_layer_of_one_by_one_matrices_is_as_computed_by_hand():
    weights = {"gate": [2.0, -1.0], "up": [3.0, 0.5], "down": [0.25, 4.0]}
    output, bound = evaluate_layer(
        torch.tensor([[1.5], [-2.0], [7.0]]),
        torch.tensor([[0, 1], [1, -1], [-1, -1]]),
        torch.tensor([[0.75, 0.25], [1.0, 9.0], [1.0, 1.0]]),
        lambda projection, e: torch.tensor([[weights[projection][e]]]).double(),
    )
    expected = [
        0.75 * 0.25 * silu(3.0) * 4.5 + 0.25 * 4.0 * silu(-1.5) * 0.75,
        4.0 * silu(2.0) * -1.0,
        0.0,
    ]
    torch.testing.assert_close(output[:, 0].tolist(), expected, rtol=1e-14, atol=0)
    assert (bound[:2] > 0).all()
    assert (bound[:2] < 1e-4).all()
    assert bound[2] == 0


def test_only_experts_that_are_used_are_asked_for_and_once():
    asked = []

    def one(projection, e):
        asked.append((projection, e))
        return torch.ones(1, 1).double()

    ids = torch.tensor([[3, 7], [7, -1]])
    evaluate_layer(torch.ones(2, 1), ids, torch.ones(2, 2), one)
    assert asked == [(p, e) for e in (3, 7) for p in ("gate", "up", "down")]


def test_a_sum_that_accumulates_its_worst_error_stays_within_the_bound():
    # 1, then u = 2**-24, K - 1 times: left to right, every 1 + u is a tie that rounds back to 1, so
    # float32 loses (K - 1) u. The bound counts K + 4 roundings.
    K = 1000
    x = torch.ones(1, K)
    w = torch.full((1, K), 2.0**-24)
    w[0, 0] = 1.0
    total = torch.zeros(())
    for term in w[0]:
        total = total + term
    assert total == 1
    y = project(exact(x), w.double())
    lost = (y.value - total.double()).abs()
    assert 0.99 * y.error < lost <= y.error


def test_a_weighted_sum_that_accumulates_its_worst_error_stays_within_the_bound():
    # The same over the slots of one token: weights 1, then u / 2, each too small to move the sum.
    T = 1000
    one = torch.ones(1, 1).double()
    weights = torch.full((1, T), 2.0**-25)
    weights[0, 0] = 1.0
    y = torch.tensor(silu(1.0))
    total = torch.zeros(())
    for w in weights[0]:
        total = total + w * y
    output, bound = evaluate_layer(
        torch.ones(1, 1),
        torch.zeros(1, T).long(),
        weights,
        lambda projection, e: one,
    )
    lost = (output - total.double()).abs()
    assert 0.4 * bound < lost <= bound


def test_the_error_of_the_input_is_carried_through_a_product():
    x = Bounded(
        value=torch.tensor([[1.0, -2.0]]).double(), error=torch.tensor([[0.5, 0.25]]).double()
    )
    y = project(x, torch.tensor([[3.0, -4.0]]).double())
    assert y.value.item() == 11
    assert 2.5 < y.error.item() < 2.5 + 1e-5


@pytest.mark.parametrize("direction", [-1, 1])
def test_swiglu_of_anything_within_the_input_s_error_stays_within_the_bound(direction):
    g = generator()
    value = torch.cat([torch.randn(4096, generator=g) * 10, torch.linspace(-120, 120, 4096)])
    up = torch.randn(value.shape, generator=g)
    error = value.abs().double() * 1e-3
    gate = Bounded(value=value.double(), error=error)
    h = activation("silu")(gate, Bounded(value=up.double(), error=error))
    # Computed in float32 at the ends of both intervals.
    moved, moved_up = value + direction * (error * 0.999).float(), up - (error * 0.999).float()
    for silu_of in (torch.nn.functional.silu, lambda x: x / (1 + torch.exp(-x))):
        result = silu_of(moved) * moved_up
        assert ((result.double() - h.value).abs() <= h.error).all()


def test_swiglu_of_exact_input_is_known_to_a_few_roundings():
    x = torch.linspace(-80, 80, 10001)
    h = activation("silu")(exact(x), exact(torch.ones_like(x)))
    result = torch.nn.functional.silu(x).double()
    assert ((result - h.value).abs() <= h.error).all()
    assert (h.error <= 11 * 2.0**-24 * h.value.abs() + 2.0**-120).all()


# Where alpha is not 1, and last limits that float32 has to round.
ACT_FNS = [{"name": name} for name in FUNCTIONS if name != "swiglustep"] + [
    {"name": "swiglustep", "limit": 0.875},
    {"name": "swigluoai", "alpha": 1.702, "limit": 7.0},
    {"name": "swigluoai", "alpha": 0.3},
    {"name": "swiglustep", "limit": 0.9},
    {"name": "silu", "limit": 9.9},
]


@pytest.mark.parametrize("direction", [-1, 0, 1])
@pytest.mark.parametrize("numbers", ACT_FNS, ids=str)
def test_activations_of_anything_within_the_input_s_error_stay_within_the_bound(numbers, direction):
    g = generator()
    value = torch.cat([torch.randn(4096, generator=g) * 3, torch.linspace(-300, 300, 8192)])
    up = torch.randn(value.shape, generator=g) * 10
    error = value.abs().double() * 1e-3 * abs(direction)
    activate = activation(numbers["name"], **{k: v for k, v in numbers.items() if k != "name"})
    h = activate(
        Bounded(value=value.double(), error=error), Bounded(value=up.double(), error=error)
    )
    moved, moved_up = value + direction * (error * 0.999).float(), up - (error * 0.999).float()
    result = ActFn(**numbers)(moved, moved_up).double()
    assert ((result - h.value).abs() <= h.error).all()


@pytest.mark.parametrize("numbers", ACT_FNS[:-2], ids=str)
def test_activations_of_exact_input_are_known_to_a_few_roundings(numbers):
    x = torch.linspace(-20, 20, 4001)
    activate = activation(numbers["name"], **{k: v for k, v in numbers.items() if k != "name"})
    h = activate(exact(x), exact(torch.ones_like(x)))
    # Beside the product: a factor in the exponential, up to alpha x, and cancellation in gelu.
    assert (h.error <= 2.0**-24 * (8 + 2 * 2 * 20) * (h.value.abs() + x.abs()) + 2.0**-120).all()


def test_swiglustep_clamps_what_silu_gives():
    activate = activation("swiglustep", limit=1.5)
    gate, up = torch.tensor([1.6, 4.0, -4.0, 4.0]), torch.tensor([1.0, 1.0, 9.0, -9.0])
    found = activate(exact(gate), exact(up)).value
    # silu(1.6) is less than 1.5, though 1.6 is more.
    wanted = [silu(1.6), 1.5, silu(-4.0) * 1.5, -1.5 * 1.5]
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-7, atol=0)


def test_swigluoai_is_as_computed_by_hand():
    activate = activation("swigluoai", alpha=2.0, limit=3.0)
    gate, up = torch.tensor([1.0, 5.0, -5.0]), torch.tensor([0.5, -9.0, 9.0])
    wanted = [
        1 / (1 + math.exp(-2.0)) * 1.5,
        3 / (1 + math.exp(-6.0)) * -2.0,
        -5 / (1 + math.exp(10.0)) * 4.0,
    ]
    found = activate(exact(gate), exact(up)).value.tolist()
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


def test_biases_are_added_before_the_function_and_before_the_router_s_weight():
    biases = {"gate": 0.5, "up": -1.0, "down": 10.0}
    one = torch.ones(1, 1).double()
    output, bound = evaluate_layer(
        torch.tensor([[2.0]]),
        torch.tensor([[0]]),
        torch.tensor([[0.25]]),
        lambda projection, e: one,
        bias=lambda projection, e: torch.tensor([biases[projection] + e]).double(),
    )
    assert output.item() == pytest.approx(0.25 * (silu(2.5) * 1.0 + 10.0), rel=1e-14)
    assert 0 < bound.item() < 1e-5


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_slope_of_gelu_is_at_most_what_the_bound_assumes(approximate):
    x = torch.linspace(-20, 20, 100001).double().requires_grad_()
    torch.nn.functional.gelu(x, approximate=approximate).sum().backward()
    assert 1.1285 < x.grad.abs().max() < 1.13


def test_the_slope_of_silu_is_at_most_what_the_bound_assumes():
    x = torch.linspace(-20, 20, 100001).double().requires_grad_()
    torch.nn.functional.silu(x).sum().backward()
    assert 1.0998 < x.grad.abs().max() < 1.1


def test_it_imports_nothing_of_ours():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not [m for m in modules if m.startswith("moequant")]
