"""`bench experts` on a GPU, small."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from moequant.act_fn import SILU, SWIGLUOAI
from moequant.benchmarks import contenders
from moequant.benchmarks.experts import OURS, Measure, bench_experts
from moequant.benchmarks.layers import ROUTINGS
from moequant.benchmarks.shapes import LayerShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = LayerShape(experts=32, hidden=1024, intermediate=512, topk=4)


def test_a_run_times_every_contender_and_says_why_others_do_not_run(every_format):
    measure = Measure(tokens=[1, 64], format=every_format, against=["grouped_mm", "vllm"])
    *_, result = bench_experts({"small": SHAPE}, measure)
    (layer,) = result["layers"]
    assert [cell["tokens"] for cell in layer["cells"]] == [1, 64]
    assert list(layer["refusals"]) == ["vllm"]
    assert layer["backend"] != "torch_reference"
    for cell in layer["cells"]:
        assert list(cell["times"]) == [OURS, "grouped_mm"]
        for time in cell["times"].values():
            assert 0 < time["p20_us"] <= time["median_us"] <= time["p80_us"]
        assert 0 < cell["share_of_floor"] < 1
        assert (cell["tiling"] is None) == (not layer["backend"].startswith("sm90_"))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of SM90",
)
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI])
@pytest.mark.parametrize(("format", "sorts_from"), [("fp8_block", 512), ("w4a8", 9000)])
def test_stages_and_host_are_timed_too(format, sorts_from, act_fn):
    shape = dataclasses.replace(SHAPE, act_fn=act_fn, biased=act_fn == SWIGLUOAI)
    measure = Measure(format=format, tokens=[1, 512, 9000], stages=True, host=True)
    *_, result = bench_experts({"s": shape}, measure)
    for cell in result["layers"][0]["cells"]:
        stages = {"prepare", "gate_up", "down", "reduce"}
        stages |= {"quantize"} if format == "w4a8" else set()
        stages |= {"sort"} if cell["tokens"] >= sorts_from else set()
        assert set(cell["stages_us"]) == stages
        assert all(us > 0 for us in cell["stages_us"].values())
        assert cell["host_us"] > 0
        assert cell["tiling"]["rows"] >= 8
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of SM90",
)
@pytest.mark.parametrize(
    ("activations", "backend", "ran", "products"),
    [
        ("fp8_token", None, "sm90_mxfp4_fp8", "fp8"),
        ("format", "sm90_w4a16", "sm90_w4a16", "bf16"),
    ],
)
def test_mxfp4_is_timed_with_either_activations_and_every_routing(
    activations, backend, ran, products
):
    measure = Measure(
        tokens=[1, 600],
        format="mxfp4",
        activations=activations,
        backend=backend,
        routings=ROUTINGS,
        against=["triton", "grouped_mm"],
    )
    *_, result = bench_experts({"small": SHAPE}, measure)
    (layer,) = result["layers"]
    assert layer["backend"] == ran
    assert result["products"] == products
    assert [cell["routing"] for cell in layer["cells"]] == [*ROUTINGS, *ROUTINGS]
    for cell in layer["cells"]:
        others = ["triton"] if cell["routing"] == "one-expert" else ["triton", "grouped_mm"]
        assert list(cell["times"]) == [OURS, *others]
        assert cell["to_uniform"] > 0


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        contenders, "_OTHERS", {"broken": lambda weights, scheme: lambda x, w, ids: x * 2}
    )
    (result,) = bench_experts(
        {"s": SHAPE}, Measure(format="fp8_block", tokens=[8], against=["broken"])
    )
    (layer,) = result["layers"]
    assert list(layer["cells"][0]["times"]) == [OURS]
    assert "broken at 8 tokens is not what the experts compute" in layer["refusals"]["broken"]
