"""Which expert a matrix product is of is told by where its second operand lies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moequant.calibration.accumulate import LayerAccumulator
from moequant.errors import UnsupportedError
from moequant.integrations.expert_inputs import ExpertInputs

E, H, I = 3, 8, 4
FUSED = {"gate_up": {"gate", "up"}, "down": {"down"}}


class Layer(nn.Module):
    """A layer with the weights of experts, which are views of `flat` where that is given."""

    def __init__(self, **weights):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))


def layer(*, transposed=False):
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    if transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    return Layer(gate_up=gate_up, down=down, router=torch.randn(E, H))


def seen_in(module, parameters, compute):
    found = []
    with (
        torch.inference_mode(),
        ExpertInputs(
            module,
            parameters,
            experts=E,
            observe=lambda name, expert, rows: found.append((name, expert, rows)),
        ),
    ):
        compute()
    return found


PRODUCTS = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w),
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "method": lambda x, w: x.matmul(w.T),
    "operator": lambda x, w: x @ w.T,
    "mm": lambda x, w: torch.mm(x, w.t()),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_kind_of_product_is_seen(product):
    module = layer()
    x, y = torch.randn(5, H), torch.randn(2, I)

    def compute():
        PRODUCTS[product](x, module.gate_up[torch.tensor(1)])
        PRODUCTS[product](x, module.router)
        PRODUCTS[product](y, module.down[2])

    (first, second) = seen_in(module, FUSED, compute)
    assert first[:2] == ("hidden", 1)
    assert torch.equal(first[2], x)
    assert second[:2] == ("intermediate", 2)
    assert torch.equal(second[2], y)


def test_weights_may_be_transposed_or_flat():
    module, x = layer(transposed=True), torch.randn(5, H)
    assert [f[:2] for f in seen_in(module, FUSED, lambda: x @ module.gate_up[2])] == [("hidden", 2)]
    flat = Layer(w1=torch.randn(E * I, H), v1=torch.randn(E * I, H), w2=torch.randn(E * I, H))
    parameters = {"w1": {"gate"}, "v1": {"up"}, "w2": {"down"}}

    def compute():
        for weight in (flat.w1, flat.v1):
            x.matmul(weight.view(E, I, H)[1].t())
        torch.randn(5, I).matmul(flat.w2.view(E, I, H)[1])

    # Gate and up have one input, which counts once.
    assert [f[:2] for f in seen_in(flat, parameters, compute)] == [
        ("hidden", 1), ("intermediate", 1),
    ]  # fmt: skip


def test_a_product_with_all_experts_leaves_out_rows_of_zeros():
    module, x = layer(transposed=True), torch.randn(E, 4, H)
    x[0] = 0
    x[2, 1:3] = 0
    found = seen_in(module, FUSED, lambda: torch.bmm(x, module.gate_up))
    assert [(name, expert, len(rows)) for name, expert, rows in found] == [
        ("hidden", 0, 0), ("hidden", 1, 4), ("hidden", 2, 2),
    ]  # fmt: skip
    assert torch.equal(found[2][2], x[2, [0, 3]])


@pytest.mark.parametrize("weight", [torch.randn(4, 2 * I, H), torch.randn(E, H, 2 * I).mT])
def test_a_parameter_that_is_no_stack_is_refused(weight):
    with pytest.raises(UnsupportedError, match=r"gate_up .* is no stack of 3 experts"):
        ExpertInputs(Layer(gate_up=weight), FUSED, experts=E, observe=print)


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [((), ()), (((1, 4),), ()), (((1, 4),), ((1, 3),)), ((), ((0, 2),))]
)
def test_products_that_were_not_seen_are_an_error(statistics_record, hidden, intermediate):
    record = statistics_record(experts=E, hidden=H, intermediate=I)
    sums = LayerAccumulator(record, 0, torch.device("cpu"))
    for name, K, rows in (("hidden", H, hidden), ("intermediate", I, intermediate)):
        for expert, count in rows:
            sums.add(name, expert, torch.randn(count, K))
    with pytest.raises(UnsupportedError, match="layer 0: gate and up were seen to multiply"):
        sums.finish()
