from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.launch import INTERPRETED
from moequant.kernels.weighted_reduce import weighted_reduce

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROW_OF_PAIR = torch.tensor([[3, -1, 0], [6, 5, 1], [-1, -1, -1]], dtype=torch.int32)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_weighted_sum_of_their_rows(dtype, weight_dtype):
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 300, generator=g).bfloat16()
    weights = torch.rand(3, 3, generator=g).to(weight_dtype)
    weights[0, 1] = torch.nan  # of a pair that adds nothing
    out = torch.full((3, 300), torch.nan, dtype=dtype, device=DEVICE)
    weighted_reduce(rows.to(DEVICE), ROW_OF_PAIR.flatten().to(DEVICE), weights.to(DEVICE), out)
    live = torch.where(ROW_OF_PAIR >= 0, weights.double(), 0.0)
    terms = live[..., None] * rows.double()[ROW_OF_PAIR.clamp(min=0).long()]
    # Three products and two sums in float32, each within 2**-24 of what it rounds; then half an ulp
    # of the dtype, or a whole one: Triton's interpreter cuts off where it should round.
    eps = torch.finfo(dtype).eps / (1 if INTERPRETED else 2)
    bound = terms.abs().sum(1) * 4 * 2.0**-24 + terms.sum(1).abs() * eps
    assert ((out.cpu().double() - terms.sum(1)).abs() <= bound).all()
    assert (out[2] == 0).all()


def test_a_bias_is_that_of_the_expert_whose_row_it_is():
    # Rows of experts 0, 2 and 3; 1 has none, and 2 begins behind a gap.
    row_end = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    expert = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    g = torch.Generator().manual_seed(1)
    rows, bias = torch.randn(7, 300, generator=g).bfloat16(), torch.randn(4, 300, generator=g)
    rows[2], bias[1] = torch.nan, torch.nan
    weights, out = torch.rand(3, 3, generator=g), torch.full((3, 300), torch.nan, device=DEVICE)
    inputs = (t.to(DEVICE) for t in (rows, ROW_OF_PAIR.flatten(), weights))
    weighted_reduce(*inputs, out, bias=bias.to(DEVICE), row_end=row_end.to(DEVICE))
    biased = (rows.double() + bias.double()[expert])[ROW_OF_PAIR.clamp(min=0).long()]
    terms = torch.where(ROW_OF_PAIR >= 0, weights, 0.0).double()[..., None] * biased
    size = (
        torch.where(ROW_OF_PAIR >= 0, weights, 0.0).double()[..., None]
        * (rows.double().abs() + bias.double().abs()[expert])[ROW_OF_PAIR.clamp(min=0).long()]
    )
    # As above, and the sum with the bias.
    assert ((out.cpu().double() - terms.sum(1)).abs() <= size.sum(1) * 5 * 2.0**-24).all()
