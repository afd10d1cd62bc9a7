"""`bench experts` on a GPU, small."""

from __future__ import annotations

import pytest
import torch

from moequant.benchmarks import experts
from moequant.benchmarks.experts import OURS, bench_experts
from moequant.benchmarks.shapes import LayerShape
from moequant.errors import NumericsError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = LayerShape(experts=32, hidden=1024, intermediate=512, topk=4)


def test_a_run_times_every_contender_and_says_why_others_do_not_run(every_format):
    result = bench_experts(SHAPE, [1, 64], format=every_format, against=["grouped_mm", "vllm"])
    assert [cell.tokens for cell in result.cells] == [1, 64]
    for cell in result.cells:
        assert list(cell.times) == [OURS, "grouped_mm"]
        assert list(cell.refusals) == ["vllm"]
        for time in cell.times.values():
            assert 0 < time.p20_us <= time.median_us <= time.p80_us
        assert 0 < cell.share_of_floor < 1
    assert result.document()["backend"] != "torch_reference"


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setitem(
        experts.__dict__, "make_contender", lambda name, weights: lambda x, ids, w: x * 2
    )
    with pytest.raises(NumericsError, match="broken at 8 tokens is not what the experts compute"):
        bench_experts(SHAPE, [8], against=["broken"])
