"""ActFn against torch's own functions in float64, and what it refuses.

Tolerance: each function is a few float32 operations, an exponential good to 2 ulp among them, and
none cancels beyond |x| of the result: 16 u |x| of the larger argument, times that of the other.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError

U = 2.0**-24
ORACLE = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


def gate_and_up():
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(4096, generator=g) * 5, torch.linspace(-90, 90, 4096)])
    return x, x[torch.randperm(8192, generator=g)]


def assert_close(result, expected, magnitude):
    assert ((result.double() - expected).abs() <= 16 * U * magnitude + 1e-37).all()


@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("name", ORACLE)
def test_gated_functions_multiply_by_up(name, limit):
    gate, up = gate_and_up()
    result = ActFn(name=name, limit=limit)(gate, up)
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    size = gate.abs().square() if name == "relu2" else gate.abs() * (1 + gate.square() * U * 64)
    assert_close(result, ORACLE[name](gate) * up, size * up.abs())


@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("name", ORACLE)
def test_functions_that_are_not_gated_are_of_up(name, limit):
    _, up = gate_and_up()
    result = ActFn(name=name, gated=False, limit=limit)(None, up)
    up = up.double() if limit is None else up.double().clamp(max=limit)
    assert_close(result, ORACLE[name](up), up.abs() * up.abs().clamp(min=1))


def test_swigluoai_is_the_function_of_gpt_oss():
    # transformers' GptOssExperts._apply_gate: (up + 1) * gate * sigmoid(1.702 gate), clamped at 7.
    gate, up = gate_and_up()
    result = SWIGLUOAI(gate, up)
    gate, up = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    # The exponent 1.702 gate is off by 2 u of itself, the sigmoid's tail by as much, relative.
    assert_close(result, expected, gate.abs() * (up.abs() + 1) * (1 + gate.abs()))


@pytest.mark.parametrize("beta", [0.0, -0.25, 2.5])
def test_swigluoai_adds_beta_to_up(beta):
    # vLLM's SWIGLUOAI_UNINTERLEAVE: silu_and_mul_with_clamp(limit, alpha, beta).
    gate, up = gate_and_up()
    result = ActFn(name="swigluoai", alpha=0.75, beta=beta, limit=3.0)(gate, up)
    gate, up = gate.double().clamp(max=3), up.double().clamp(-3, 3)
    expected = gate * torch.sigmoid(0.75 * gate) * (up + beta)
    assert_close(result, expected, gate.abs() * (up.abs() + abs(beta)) * (1 + gate.abs()))


def test_swigluoai_of_alpha_one_and_beta_zero_is_silu():
    gate, up = gate_and_up()
    assert torch.equal(ActFn(name="swigluoai", beta=0.0)(gate, up), SILU(gate, up))


def test_swiglustep_clamps_silu_and_not_its_argument():
    # vLLM's SwigluStepAndMul: silu(gate).clamp(max=limit) * up.clamp(-limit, limit).
    gate, up = gate_and_up()
    result = ActFn(name="swiglustep", limit=3.0)(gate, up)
    gate, up = gate.double(), up.double().clamp(-3, 3)
    assert_close(
        result, functional.silu(gate).clamp(max=3) * up, gate.abs() * up.abs() * (1 + gate.abs())
    )
    # silu(3.1) is 2.97: a clamped argument would give silu(3) = 2.86.
    at = ActFn(name="swiglustep", limit=3.0)(torch.tensor([3.1]), torch.tensor([1.0]))
    assert at.item() == pytest.approx(2.9663, abs=1e-4)


@pytest.mark.parametrize("linear_beta", [None, 25.0])
@pytest.mark.parametrize("beta", [1.0, 4.0])
def test_situ_saturates_gate_and_up(beta, linear_beta):
    # Kimi-K3's SituAndMul.
    gate, up = gate_and_up()
    result = ActFn(name="situ", beta=beta, linear_beta=linear_beta)(gate, up)
    gate, up = gate.double(), up.double()
    factor = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    expected = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * factor
    # exp(-gate) is off by u |gate| of itself, and infinite where the result is below 2**-118.
    assert_close(result, expected, expected.abs() * (1 + gate.abs()) + 2.0**-96)
    assert SITU(torch.tensor([1e9]), torch.tensor([-1e9])).item() == -100.0


def test_nan_and_infinity_are_not_hidden():
    x = torch.tensor([float("nan"), float("inf")])
    for act_fn in (SILU, RELU2, ActFn(name="gelu"), ActFn(name="gelu_tanh")):
        assert not act_fn(x if act_fn.gated else None, torch.ones(2) * x).isfinite().any()
    nan, one = x[:1], torch.ones(1)
    for act_fn in (SWIGLUOAI, SITU, ActFn(name="swiglustep", limit=1.0)):
        assert act_fn(nan, one).isnan().all()
        assert act_fn(one, nan).isnan().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tanh"}, "'tanh', but the runtime computes silu, gelu"),
        ({"name": "swigluoai", "gated": False}, "swigluoai is always gated"),
        ({"name": "silu", "alpha": 2.0}, r"alpha 2.0: activation function silu has none"),
        ({"name": "swiglustep", "limit": 7.0, "gated": False}, "swiglustep is always gated"),
        ({"name": "situ", "gated": False}, "situ is always gated"),
        ({"name": "swiglustep"}, "swiglustep clamps, so it needs a limit"),
        ({"name": "gelu", "beta": 0.0}, r"beta 0.0: activation function gelu has none; .* at 1.0"),
        ({"name": "swigluoai", "linear_beta": 2.0}, r"linear_beta 2.0: .* leave it at None"),
        (
            {"name": "swigluoai", "beta": float("inf")},
            "beta is inf, but it must be a number, and fin",
        ),
        ({"name": "situ", "beta": 0.0}, "beta is 0.0, but it must be positive, and finite"),
        ({"name": "situ", "linear_beta": -1.0}, "linear_beta is -1.0, .* positive, .* or None"),
        ({"name": "silu", "limit": 0.0}, r"limit is 0.0, but it must be positive"),
        ({"name": "silu", "limit": float("nan")}, r"limit is nan"),
        ({"name": ["silu"]}, r"activation function \['silu'\], but"),
        ({"name": "silu", "gated": "no"}, "gated is 'no', but it must be True or False"),
        ({"name": "silu", "alpha": "1"}, "alpha is '1', but it must be a number"),
        ({"name": "silu", "beta": None}, "beta is None, but it must be a number"),
        ({"name": "silu", "limit": torch.ones(2)}, r"limit is tensor\(\[1., 1.\]\), but it must"),
        ({"name": "silu", "limit": True}, "limit is True, but it must be positive"),
        # Infinite, or zero, in the float32 that experts compute in.
        ({"name": "swigluoai", "beta": 1e300}, r"beta is 1e\+300, but .* finite in float32"),
        ({"name": "swigluoai", "alpha": 10**40}, r"alpha is 10+, but .* finite in float32"),
        ({"name": "situ", "linear_beta": 1e39}, r"linear_beta is 1e\+39, but .* in float32"),
        ({"name": "situ", "beta": 1e-300}, "beta is 1e-300, but it must be positive, and"),
        ({"name": "silu", "limit": 1e-46}, "limit is 1e-46, but it must be positive, and"),
    ],
)
def test_what_is_no_function_is_refused(arguments, message):
    with pytest.raises(UnsupportedError, match=message):
        ActFn(**arguments).check()


def test_the_largest_numbers_of_float32_are_taken():
    most = torch.finfo(torch.float32).max
    act_fn = ActFn(name="swigluoai", alpha=-most, beta=-most, limit=most)
    assert act_fn(torch.ones(1), torch.ones(1)).item() == 0
    assert ActFn(name="situ", beta=2, linear_beta=1)(torch.ones(1), torch.ones(1)).isfinite()


def test_it_says_what_it_is():
    assert str(SWIGLUOAI) == "swigluoai, limit 7, alpha 1.702"
    assert str(SITU) == "situ, beta 4, linear_beta 25"
    assert str(RELU2) == "relu2, not gated"
