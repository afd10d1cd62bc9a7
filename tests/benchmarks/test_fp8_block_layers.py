"""What `bench experts --stages` and `tune` do on SM90, with GEMMs that compute nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.benchmarks import stages, tune
from moequant.benchmarks.cuda_timing import Time
from moequant.benchmarks.layers import random_experts, random_inputs
from moequant.benchmarks.shapes import LayerShape
from moequant.errors import NumericsError
from moequant.kernels.fp8_block import sm90_fp8_fused as kernels
from moequant.kernels.fp8_block.tuning import candidates
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.sm90 import quantize_permute
from moequant.runtime import FusedExperts
from moequant.runtime.backends.sm90_fp8_block import Sm90Fp8Block

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton kernels are compiled here")
CPU = torch.device("cpu")
SHAPE = LayerShape(experts=4, hidden=256, intermediate=128, topk=2)


class Idle:
    """A grouped GEMM whose output is 0 before it is called and after."""

    def __init__(self, config, *, out, **tensors):
        out.view(torch.uint8).zero_()

    def route(self, topk_ids, expert_map):
        pass

    def __call__(self, stream):
        pass


@pytest.fixture(autouse=True)
def sm90(monkeypatch):
    """A CPU passes for a GPU of SM90."""
    properties = SimpleNamespace(name="A GPU", multi_processor_count=132)
    monkeypatch.setattr(Sm90Fp8Block, "supports", lambda self, workload: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(kernels, "stream_of", lambda device: 0)
    monkeypatch.setattr(kernels, "GroupedGemm", Idle)


def call_each(contenders, *, rests):
    """Call everything once; a contender takes as many microseconds as others came before it."""
    for calls in contenders.values():
        for call in calls:
            call()
    return {n: Time(median_us=i, p20_us=i, p80_us=i) for i, n in enumerate(contenders)}


@pytest.mark.parametrize(("tokens", "sorts"), [(4, False), (5, True)])
def test_stages_are_the_launches_of_a_call(monkeypatch, tokens, sorts):
    timed = {}
    monkeypatch.setitem(quantize_permute.FEW_SLOTS, 128, 8)
    monkeypatch.setattr(
        stages, "time_interleaved", lambda c, rests: timed.update(c) or call_each(c, rests=rests)
    )
    experts = FusedExperts(random_experts(SHAPE, "fp8_block", CPU), backend="sm90_fp8_block")
    call = random_inputs(SHAPE, tokens, CPU, 0)
    times = stages.time_stages(experts, call, rests=False)
    assert list(times) == ["prepare", "gate_up", "down", "reduce", *(["sort"] if sorts else [])]
    assert set(map(len, timed.values())) == {4}
    assert stages.timed_tiling(experts, tokens, 2)["rows"] in (8, 16, 32, 64, 128)


def test_more_tokens_than_a_part_have_the_stages_and_the_tiling_of_a_part(monkeypatch):
    asked = []
    monkeypatch.setattr(stages, "time_interleaved", lambda c, rests: {})
    experts = FusedExperts(
        random_experts(SHAPE, "fp8_block", CPU), backend="sm90_fp8_block", max_tokens=40
    )
    plan = kernels.Fp8BlockPlan
    monkeypatch.setattr(
        kernels, "Fp8BlockPlan", lambda w, M, T, **rest: asked.append(M) or plan(w, M, T, **rest)
    )
    stages.time_stages(experts, random_inputs(SHAPE, 100, CPU, 0), rests=False)
    assert asked == [34]
    assert stages.timed_tiling(experts, 100, 2) == stages.timed_tiling(experts, 34, 2)


class RightBut:
    """A plan that computes what the reference does, but with a tiling of `wrong`."""

    wrong = ()
    experts = None

    def __init__(self, weights, tokens, topk, *, workspace, tiling):
        assert workspace.numel() >= kernels.workspace_bytes(weights, tokens, topk, tiling)
        self.tiling = tiling

    def __call__(self, hidden, topk_weights, ids, out):
        y = FusedExperts(self.experts)(hidden, topk_weights, ids)
        out.copy_(-y if self.tiling in self.wrong else y)


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(RightBut, "experts", random_experts(SHAPE, "fp8_block", CPU))
    monkeypatch.setattr(kernels, "Fp8BlockPlan", RightBut)
    monkeypatch.setattr(tune, "time_interleaved", call_each)
    # The reference, that is: by default the backend here would be the one of SM90.
    monkeypatch.setattr(Sm90Fp8Block, "default_on", ())
    return tune.CudaLayer(SHAPE, CPU)


def test_a_layer_times_every_tiling_it_is_asked_for(layer):
    problem = layer.problem(20)
    assert (problem.gpu, problem.tokens, problem.intermediate) == ("A GPU", 20, 128)
    tilings = candidates(problem)
    assert layer.times_us(20, tilings) == {tiling: us for us, tiling in enumerate(tilings)}


def test_a_tiling_that_computes_something_else_is_named_and_not_timed(layer, monkeypatch):
    tilings = candidates(layer.problem(20))
    monkeypatch.setattr(RightBut, "wrong", (tilings[1],))
    with pytest.raises(NumericsError, match=r"Tiling\(.*\) at 20 tokens is not what"):
        layer.times_us(20, tilings)
