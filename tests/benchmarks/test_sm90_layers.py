"""What `bench experts --stages` and `tune` do on SM90, with GEMMs that compute nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.benchmarks import stages, tune
from moequant.benchmarks.cuda_timing import Time
from moequant.benchmarks.experts import our_calc_diff
from moequant.benchmarks.layers import random_experts, random_inputs
from moequant.benchmarks.shapes import LayerShape
from moequant.errors import NumericsError
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.sm90 import plan as sm90_plan
from moequant.kernels.sm90 import quantize_permute
from moequant.kernels.sm90 import weights as sm90_weights
from moequant.kernels.sm90.weights import Sm90Weights
from moequant.runtime import FusedExperts
from moequant.runtime.backends.sm90_fp8_block import Sm90Fp8Block
from moequant.runtime.backends.sm90_w4a8 import Sm90W4a8
from moequant.runtime.backends.sm90_w4a16 import Sm90W4a16

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton kernels are compiled here")
CPU = torch.device("cpu")
SHAPE = LayerShape(experts=4, hidden=256, intermediate=128, topk=2)
every_format = pytest.mark.parametrize("format", ["fp8_block", "w4a8"])


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
    """A CPU passes for a GPU of SM90; returns the kernels that were to be compiled, by request."""
    properties = SimpleNamespace(name="A GPU", multi_processor_count=132)
    for backend in (Sm90Fp8Block, Sm90W4a8):
        monkeypatch.setattr(backend, "supports", lambda self, workload: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(sm90_plan, "stream_of", lambda device: 0)
    monkeypatch.setattr(sm90_weights, "GroupedGemm", Idle)
    compiled = []
    monkeypatch.setattr(sm90_weights, "compile_ahead", lambda configs: compiled.append([*configs]))
    return compiled


def call_each(contenders, *, rests):
    """Call everything once; a contender takes as many microseconds as others came before it."""
    for calls in contenders.values():
        for call in calls:
            call()
    return {n: Time(median_us=i, p20_us=i, p80_us=i) for i, n in enumerate(contenders)}


@every_format
@pytest.mark.parametrize(("tokens", "sorts"), [(4, False), (5, True)])
def test_stages_are_the_launches_of_a_call(monkeypatch, format, tokens, sorts):
    timed = {}
    monkeypatch.setattr(quantize_permute, "FEW_PAIRS", {128: 8, 0: 8})
    monkeypatch.setattr(sm90_plan, "FEW_PAIRS", {128: 8, 0: 8})
    monkeypatch.setattr(
        stages, "time_interleaved", lambda c, rests: timed.update(c) or call_each(c, rests=rests)
    )
    experts = FusedExperts(random_experts(SHAPE, format, CPU), backend=f"sm90_{format}")
    call = random_inputs(SHAPE, tokens, CPU, 0)
    stages.check_has_stages(experts)
    times = stages.time_stages(experts, call, rests=False)
    between = ["quantize"] if format == "w4a8" else []
    sort = ["sort"] if sorts else []
    assert list(times) == ["prepare", "gate_up", *between, "down", "reduce", *sort]
    assert set(map(len, timed.values())) == {4}
    assert stages.timed_tiling(experts, tokens, 2)["rows"] in (8, 16, 32, 64, 128)


@every_format
def test_more_tokens_than_a_part_have_the_stages_and_the_tiling_of_a_part(monkeypatch, format):
    asked = []
    monkeypatch.setattr(stages, "time_interleaved", lambda c, rests: {})
    experts = FusedExperts(
        random_experts(SHAPE, format, CPU), backend=f"sm90_{format}", max_tokens=40
    )
    plan = Sm90Weights.plan
    monkeypatch.setattr(
        Sm90Weights, "plan", lambda w, M, T, **rest: asked.append(M) or plan(w, M, T, **rest)
    )
    stages.time_stages(experts, random_inputs(SHAPE, 100, CPU, 0), rests=False)
    assert asked == [34]
    assert stages.timed_tiling(experts, 100, 2) == stages.timed_tiling(experts, 34, 2)


class Relaunches:
    """Stands for a launch that can be repeated, and notes what it is repeated with."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def keeping_all_but(self, count):
        return self

    def __call__(self, *first, stream):
        self.log.append((self.name, len(first)))


@every_format
def test_a_call_of_known_kinds_repeats_the_launches_of_the_first(monkeypatch, format):
    log = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("prepare", "quantize_sorted_rows", "weighted_reduce"):
        launched = getattr(sm90_plan, name)

        def known(*args, launched=launched, name=name, **kwargs):
            launched(*args, **kwargs)
            return Relaunches(name, log)

        monkeypatch.setattr(sm90_plan, name, known)
    experts = FusedExperts(random_experts(SHAPE, format, CPU), backend=f"sm90_{format}")
    weights = experts.packed().kernel_weights
    workspace = torch.zeros(weights.workspace_bytes(3, 2), dtype=torch.uint8)
    # At multiples of 16 bytes, as a GPU has them.
    room = torch.zeros(64, dtype=torch.uint8)
    ids = room[-room.data_ptr() % 16 :][:24].view(torch.int32).view(3, 2)
    hidden, router = torch.zeros(3, 256), torch.zeros(3, 2)
    out = torch.empty_like(hidden)
    aligned = not (hidden.data_ptr() | router.data_ptr() | out.data_ptr()) % 16
    assert aligned, "torch allocates at multiples of 64 bytes"
    for _ in range(2):
        weights.run(hidden, router, ids, out=out, workspace=workspace)
    between = [("quantize_sorted_rows", 0)] if format == "w4a8" else []
    assert log == [("prepare", 3), *between, ("weighted_reduce", 4)]
    weights.run(hidden, router, ids.long(), out=out, workspace=workspace)
    assert len(log) == 2 + len(between)


class RightBut:
    """A plan that computes what the reference does, but with a tiling of `wrong`."""

    wrong = ()
    experts = None

    def __init__(self, weights, tokens, topk, *, workspace, tiling):
        assert workspace.numel() >= weights.workspace_bytes(tokens, topk, tiling)
        self.tiling = tiling

    def __call__(self, hidden, topk_weights, ids, out):
        y = FusedExperts(self.experts, backend="torch_reference")(hidden, topk_weights, ids)
        out.copy_(-y if self.tiling in self.wrong else y)


@pytest.fixture(params=["fp8_block", "w4a8"])
def layer(request, monkeypatch):
    monkeypatch.setattr(RightBut, "experts", random_experts(SHAPE, request.param, CPU))
    monkeypatch.setattr(Sm90Weights, "plan", lambda w, M, T, **rest: RightBut(w, M, T, **rest))
    monkeypatch.setattr(tune, "time_interleaved", call_each)
    return tune.TunedLayer(SHAPE, request.param, f"sm90_{request.param}", CPU)


def test_a_layer_times_every_tiling_it_is_asked_for(layer):
    tilings = layer.tuner.tilings(20, 2)
    assert len(tilings) > 1
    assert layer.times_us(20, tilings) == {tiling: us for us, tiling in enumerate(tilings)}


def test_the_kernels_of_all_tilings_are_compiled_together(layer, sm90):
    tilings = layer.tuner.tilings(20, 2)
    layer.times_us(20, tilings)
    (configs,) = sm90
    assert [config.rows for config in configs[::2]] == [tiling.rows for tiling in tilings]
    assert len(configs) == 2 * len(tilings)


@pytest.mark.parametrize("activations", ["format", "fp8_token"])
def test_a_tiling_is_compared_with_the_reference_of_the_same_activations(monkeypatch, activations):
    weights, compared = random_experts(SHAPE, "mxfp4", CPU), []
    monkeypatch.setattr(RightBut, "experts", weights)
    monkeypatch.setattr(Sm90Weights, "plan", lambda w, M, T, **rest: RightBut(w, M, T, **rest))
    monkeypatch.setattr(tune, "time_interleaved", call_each)

    def check_output(who, got, want, pick, *, most):
        compared.append((want, most))

    monkeypatch.setattr(tune, "check_output", check_output)
    backend = "sm90_mxfp4_fp8" if activations == "fp8_token" else "sm90_w4a16"
    monkeypatch.setattr(Sm90W4a16, "supports", lambda self, workload: None)
    layer = tune.TunedLayer(SHAPE, "mxfp4", backend, CPU, activations=activations)
    layer.times_us(5, layer.tuner.tilings(5, 2)[:1])
    call = random_inputs(SHAPE, 5, CPU, 5).arguments
    ((want, most),) = compared
    assert torch.equal(want, FusedExperts(weights, activations=activations)(*call))
    assert most == our_calc_diff("fp8_token" if activations == "fp8_token" else "none")


def test_a_tiling_that_computes_something_else_is_named_and_not_timed(layer, monkeypatch):
    tilings = layer.tuner.tilings(20, 2)
    monkeypatch.setattr(RightBut, "wrong", (tilings[1],))
    with pytest.raises(NumericsError, match=r"Tiling\(.*\) at 20 tokens is not what"):
        layer.times_us(20, tilings)
