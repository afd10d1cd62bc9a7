from __future__ import annotations

import pytest
import torch

from moequant.conversion.stack import Stack
from moequant.models import StackedExperts


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_stack_holds_gate_and_up_where_the_architecture_table_says(interleaved):
    stacked = StackedExperts({"gate_up": "w13", "down": "w2", "interleaved": interleaved})
    stack = Stack(tensor="w13", expert=0, experts=1, interleaved=interleaved)
    parts = {"gate": torch.arange(6).reshape(3, 2), "up": -torch.arange(6).reshape(3, 2)}
    joined = stack.join([*parts.values()])
    assert joined.shape == (6, 2)
    for projection, part in parts.items():
        rows = stacked.rows(projection, 3)
        assert torch.equal(joined[rows.start : rows.stop : rows.step], part)


def test_down_is_stacked_as_it_is():
    stack = Stack(tensor="w2", expert=0, experts=1, interleaved=True)
    down = torch.arange(6).reshape(3, 2)
    assert torch.equal(stack.join([down]), down)
    assert StackedExperts({"gate_up": "w13", "down": "w2"}).rows("down", 2) is None
