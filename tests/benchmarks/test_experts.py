"""`bench experts` without a GPU: shapes, floors worked out by hand, what a run holds."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.benchmarks import contenders, experts
from moequant.benchmarks.contenders import contender_names, make_contender
from moequant.benchmarks.cuda_timing import Ceilings, Time
from moequant.benchmarks.experts import (
    OURS,
    Measure,
    bench_experts,
    calc_diff,
    check_output,
    checked_tokens,
    describe_routing,
    floor_us,
    inputs_of,
    products_of,
    work_of,
)
from moequant.benchmarks.layers import ROUTINGS, Inputs, random_experts, random_inputs
from moequant.benchmarks.random_models import random_model
from moequant.benchmarks.shapes import SHAPES, LayerShape, parse_shape, parse_shapes
from moequant.errors import ArgumentError, NumericsError, UnsupportedError
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.backends import backends

SMALL = LayerShape(experts=6, hidden=256, intermediate=128, topk=2)
CPU = torch.device("cpu")
CEILINGS = Ceilings(read_tb_per_s=4.0, fp8_tflops=1000.0, bf16_tflops=500.0)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_known_by_its_name_and_by_its_sizes(name):
    assert parse_shape(name) == SHAPES[name]
    assert str(parse_shape(str(SHAPES[name]))) == str(SHAPES[name])


def test_all_are_the_models_and_sizes_are_plain():
    plain = "128x2880x2880x4"
    shapes = parse_shapes(f"all,{plain}")
    assert list(shapes) == [*SHAPES, plain]
    assert shapes["gpt-oss-120b"].act_fn == SWIGLUOAI
    assert shapes[plain] == dataclasses.replace(shapes["gpt-oss-120b"], act_fn=SILU, biased=False)


def test_gpt_oss_is_the_larger_one_in_every_benchmark():
    assert parse_shape("gpt-oss") == SHAPES["gpt-oss-120b"]
    assert list(parse_shapes("gpt-oss")) == ["gpt-oss-120b"]
    assert random_model("gpt-oss") is random_model("gpt-oss-120b")


@pytest.mark.parametrize("text", ["qwen", "8x256x128", "0x256x128x2", "8x256x128x2x1", "8x8x8x9"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ArgumentError, match=text):
        parse_shape(text)


def test_work_counts_active_experts_input_output_and_products():
    weights = random_experts(SMALL, "fp8_block", CPU)
    ids = torch.tensor([[0, 1], [1, 4], [0, 1]], dtype=torch.int32)
    call = Inputs(hidden=torch.zeros(3, 256).bfloat16(), ids=ids, topk_weights=torch.ones(3, 2))
    bytes_moved, flop = work_of(weights, [call, call])
    # 3 experts of 3 matrices of 256 x 128 bytes with 2 scales of 4 bytes; 3 tokens in and out.
    assert bytes_moved == 3 * 3 * (256 * 128 + 2 * 4) + 2 * 3 * 256 * 2
    assert flop == 6 * 3 * 2 * 256 * 128


def test_ids_of_minus_one_move_no_weights_and_have_no_products():
    weights = random_experts(SMALL, "fp8_block", CPU)
    ids = torch.tensor([[-1, 1], [1, 4], [-1, 1]], dtype=torch.int32)
    call = Inputs(hidden=torch.zeros(3, 256).bfloat16(), ids=ids, topk_weights=torch.ones(3, 2))
    bytes_moved, flop = work_of(weights, [call])
    assert bytes_moved == 2 * 3 * (256 * 128 + 2 * 4) + 2 * 3 * 256 * 2
    assert flop == 4 * 3 * 2 * 256 * 128
    assert describe_routing([call], 6) == {"experts_used": 2, "busiest_pairs": 3}
    other = dataclasses.replace(call, ids=torch.full((3, 2), 5))
    assert describe_routing([call, other], 6) == {"experts_used": 1.5, "busiest_pairs": 4.5}


def test_the_floor_is_the_longer_of_bytes_and_products():
    assert floor_us(8e6, 1e9, CEILINGS, "fp8") == pytest.approx(2.0)
    assert floor_us(8e6, 1e10, CEILINGS, "fp8") == pytest.approx(10.0)
    assert floor_us(8e6, 1e10, CEILINGS, "bf16") == pytest.approx(20.0)


def test_floors_have_the_rate_of_fp8_where_activations_are_quantized_and_the_gpu_has_it():
    without = dataclasses.replace(CEILINGS, fp8_tflops=None)
    assert products_of("fp8_token", CEILINGS) == products_of("fp8_group128", CEILINGS) == "fp8"
    assert products_of("mxfp8", CEILINGS) == "fp8"
    assert products_of("none", CEILINGS) == products_of("fp8_token", without) == "bf16"
    with pytest.raises(
        UnsupportedError,
        match=r"activations in nvfp4 is not measured.*; time activations in none, .* or mxfp8$",
    ):
        products_of("nvfp4", CEILINGS)


WIDE = dataclasses.replace(SMALL, experts=64, topk=4)


def test_only_the_ids_depend_on_the_routing():
    calls = [random_inputs(WIDE, 50, CPU, 3, routing=r, busiest=9) for r in ROUTINGS]
    for call in calls[1:]:
        assert torch.equal(call.hidden, calls[0].hidden)
        assert torch.equal(call.topk_weights, calls[0].topk_weights)
        assert call.ids.dtype == calls[0].ids.dtype
    for call in calls[:2]:
        assert call.ids.sort(1).values.diff(dim=1).ne(0).all()
    assert torch.equal(random_inputs(WIDE, 50, CPU, 3).ids, calls[0].ids)


def test_one_expert_has_a_pair_of_every_token_and_the_others_none():
    ids = random_inputs(WIDE, 50, CPU, 3, routing="one-expert", busiest=9).ids
    assert ids.tolist() == [[-1, -1, -1, 9]] * 50


def test_skewed_scores_fall_with_the_square_of_the_rank():
    # Of two experts of ranks 0 and 1, u0 * 4 < u1 * 1 has a probability of 1/8: the second is
    # first for one token in eight. 20000 tokens scatter by sqrt(20000 * 7 / 64) = 47.
    two = dataclasses.replace(SMALL, experts=2, topk=1)
    for busiest in (0, 1):
        ids = random_inputs(two, 20000, CPU, 3, routing="skewed", busiest=busiest).ids
        assert abs(int((ids == 1 - busiest).sum()) - 2500) < 5 * 47


def test_the_inputs_of_a_cell_have_busiest_experts_of_their_own():
    calls = inputs_of(WIDE, 8, CPU, "one-expert")
    assert [int(call.ids.max()) for call in calls] == [0, 8, 16, 24, 32, 40, 48, 56]
    calls = inputs_of(WIDE, 500, CPU, "skewed")
    for i, call in enumerate(calls):  # all of the eight busiest have more than the mean
        counts = call.ids.flatten().bincount(minlength=64).roll(-16 * i)
        assert counts[:8].min() > 500 * 4 / 64


def test_random_layers_run_and_repeat(every_format):
    weights = random_experts(SMALL, every_format, CPU)
    call = random_inputs(SMALL, 5, CPU, seed=3)
    assert call.ids.sort(1).values.diff(dim=1).ne(0).all()  # distinct experts a token
    first = FusedExperts(weights)(*call.arguments)
    again = random_inputs(SMALL, 5, CPU, seed=3)
    assert torch.equal(
        FusedExperts(random_experts(SMALL, every_format, CPU))(*again.arguments), first
    )
    assert first.isfinite().all()
    assert first.norm() > 0


def test_calc_diff_is_zero_for_the_same_and_nan_for_nan():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert calc_diff(x, -x) == pytest.approx(2)
    assert not calc_diff(x * float("nan"), x) <= 1


def test_every_backend_is_known_and_what_cannot_be_timed_says_why():
    weights = random_experts(SMALL, "mxfp4", CPU)
    assert set(backends()) < set(contender_names())
    for name, reason in (
        ("vllm", "blocks of 128 x 128 and activations in fp8_group128, not with mxfp4 and none"),
        ("cutlas", "unknown contender 'cutlas'"),
        ("sm90_fp8_block", "runs only fp8_block"),
        ("torch_reference", "waits for the device, which no CUDA graph captures"),
        ("naive_batched", "waits for the device, which no CUDA graph captures"),
    ):
        error = ArgumentError if name == "cutlas" else UnsupportedError
        with pytest.raises(error, match=reason):
            make_contender(name, weights)


def test_another_backend_runs_with_the_same_activations(monkeypatch):
    monkeypatch.setattr(contenders, "capturable", lambda module: module)
    weights = random_experts(SMALL, "mxfp4", CPU)
    call = random_inputs(SMALL, 5, CPU, 0).arguments
    got = make_contender("torch_reference", weights, activations="fp8_token")(*call)
    assert torch.equal(got, FusedExperts(weights, activations="fp8_token")(*call))
    assert not torch.equal(got, FusedExperts(weights)(*call))
    with pytest.raises(UnsupportedError, match="takes only activations that are not quantized"):
        make_contender("sm90_w4a16", weights, activations="fp8_token")


@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_mm_computes_what_the_experts_do_without_quantized_activations(act_fn, biased):
    weights = random_experts(dataclasses.replace(SMALL, act_fn=act_fn, biased=biased), "mxfp4", CPU)
    call = random_inputs(SMALL, 20, CPU, 0).arguments
    got = make_contender("grouped_mm", weights)(*call)
    want = FusedExperts(weights, activations="none")(*call)
    # BF16 rounds by at most 2**-8 of a value, 2**-8 / sqrt(3) in the mean. At most 14 results are
    # rounded in a row: gate and up, their biases, four or five of the function, down, its bias, the
    # router's weight, the product with it, the sum. Independent, they are an error of sqrt(14)
    # times that, and calc_diff is half its square.
    assert calc_diff(got, want) <= 14 * 2**-16 / 3 / 2


def test_grouped_mm_is_of_the_two_functions_it_is_written_for():
    weights = random_experts(SMALL, "mxfp4", CPU)
    parts = {**weights.projections(), "gate": None}
    with pytest.raises(UnsupportedError, match="timed only with gated silu or swigluoai"):
        make_contender("grouped_mm", ExpertWeights(**parts, act_fn=RELU2))


def test_it_is_refused_without_a_cuda_device():
    with pytest.raises(UnsupportedError, match="device 'cpu': experts are timed by"):
        next(bench_experts({"small": SMALL}, Measure(format="fp8_block", tokens=[1]), device="cpu"))


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs as on a GPU, but for times: a call of every contender takes 10 us, or 5 by peers."""
    monkeypatch.setattr(experts, "cuda_device", lambda device: CPU)
    monkeypatch.setattr(experts, "capturable", lambda module: module)
    monkeypatch.setattr(experts, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(experts, "describe_machine", lambda device: {"gpu": "none"})
    monkeypatch.setattr(experts, "host_time_us", lambda call: 7.0 if call() is not None else 0.0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def time_interleaved(contenders, *, rests):
        for calls in contenders.values():
            assert [call().shape for call in calls]
        us = {name: 10.0 if name == OURS else 5.0 for name in contenders}
        return {n: Time(median_us=t, p20_us=t - 1, p80_us=t + 1) for n, t in us.items()}

    monkeypatch.setattr(experts, "time_interleaved", time_interleaved)


def contenders_are(monkeypatch, **made):
    """`made` in place of the contenders; each is called with ours as its argument."""
    others = {n: lambda w, scheme, m=m: m(w) for n, m in made.items()}
    monkeypatch.setattr(contenders, "_OTHERS", others)


def broken(weights):
    return lambda hidden, topk_weights, ids: hidden


def refused(weights):
    raise UnsupportedError("is not installed")


def out_of_memory(weights):
    def run(hidden, topk_weights, ids):
        if hidden.shape[0] > 1:
            raise torch.OutOfMemoryError("out of memory\nsee the manual")
        return FusedExperts(weights)(hidden, topk_weights, ids)

    return run


def test_a_run_holds_what_was_measured_and_is_json(on_cpu, monkeypatch):
    contenders_are(monkeypatch, right=FusedExperts, refused=refused, full=out_of_memory)
    shapes = {"small": SMALL, "biased": dataclasses.replace(SMALL, act_fn=SWIGLUOAI, biased=True)}
    against = ["right", "refused", "full"]
    measure = Measure(format="fp8_block", tokens=[1, 20], against=against, host=True)
    *_, document = bench_experts(shapes, measure)
    assert [layer["shape"] for layer in document["layers"]] == ["small", "biased"]
    assert [layer["act_fn"] for layer in document["layers"]] == ["silu", str(SWIGLUOAI)]
    assert [layer["biased"] for layer in document["layers"]] == [False, True]
    for layer in document["layers"]:
        assert layer["backend"] == "torch_reference"
        first, second = layer["cells"]
        assert list(first["times"]) == [OURS, "right", "full"]
        assert list(second["times"]) == [OURS, "right"]
        assert layer["refusals"] == {
            "refused": "is not installed",
            "full": "at 20 tokens: out of memory",
        }
        assert (first["tokens"], second["tokens"]) == (1, 20)
        assert first["share_of_floor"] == pytest.approx(first["floor_us"] / 10)
        assert first["tb_per_s"] == pytest.approx(first["bytes_moved"] / 10e6)
        assert (first["host_us"], first["stages_us"], first["tiling"]) == (7.0, None, None)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_activations_are_those_of_the_reference_and_of_the_floor(on_cpu, monkeypatch):
    # So much bandwidth that products are the floor.
    fast = dataclasses.replace(CEILINGS, read_tb_per_s=1e9)
    monkeypatch.setattr(experts, "measure_ceilings", lambda device: fast)
    flop = 20 * 2 * 3 * 2 * 256 * 128
    call = inputs_of(SMALL, 20, CPU)[0].arguments
    weights = random_experts(SMALL, "mxfp4", CPU)
    for activations, scheme, products, tflops in (
        ("format", "none", "bf16", 500),
        ("fp8_token", "fp8_token", "fp8", 1000),
    ):
        compared = []
        monkeypatch.setattr(
            experts, "check_output", lambda who, got, want, pick, c=compared, **_: c.append(want)
        )
        measure = Measure(format="mxfp4", tokens=[20], activations=activations)
        (document,) = bench_experts({"small": SMALL}, measure)
        assert (document["activations"], document["products"]) == (scheme, products)
        (cell,) = document["layers"][0]["cells"]
        assert cell["floor_us"] == pytest.approx(flop / tflops / 1e6)
        (want,) = compared
        assert torch.equal(want, FusedExperts(weights, activations=activations)(*call))


def test_a_cell_has_its_routing_and_what_its_own_floor_allows(on_cpu, monkeypatch):
    contenders_are(monkeypatch, right=FusedExperts)
    measure = Measure(format="fp8_block", tokens=[1, 20], routings=ROUTINGS, against=["right"])
    (document,) = bench_experts({"small": SMALL}, measure)
    (layer,) = document["layers"]
    cells = layer["cells"]
    assert [(cell["tokens"], cell["routing"]) for cell in cells] == [
        (M, routing) for M in (1, 20) for routing in ROUTINGS
    ]
    for uniform, skewed, one in (cells[:3], cells[3:]):
        assert one["experts_used"] == 1
        assert one["busiest_pairs"] == one["tokens"]
        assert uniform["busiest_pairs"] <= skewed["busiest_pairs"]
        # All take 10 us here, so what the floors are apart, times over floors are apart.
        assert uniform["to_uniform"] == 1
        for cell in (skewed, one):
            assert cell["to_uniform"] == pytest.approx(uniform["floor_us"] / cell["floor_us"])
        # A floor of one expert, whose weights a call reads once.
        M = one["tokens"]
        assert one["bytes_moved"] == 3 * (256 * 128 + 2 * 4) + 2 * M * 256 * 2
        assert list(one["times"]) == [OURS]
        assert list(uniform["times"]) == list(skewed["times"]) == [OURS, "right"]
    reason = "at 1 tokens, one-expert routing: it is timed only without ids of -1"
    assert layer["refusals"] == {"right": reason}


def test_without_uniform_routing_there_is_nothing_to_compare_with(on_cpu):
    measure = Measure(format="fp8_block", tokens=[20], routings=["skewed"])
    (document,) = bench_experts({"small": SMALL}, measure)
    assert document["layers"][0]["cells"][0]["to_uniform"] is None


def test_what_was_measured_is_there_after_every_layer(on_cpu):
    runs = bench_experts({"one": SMALL, "other": SMALL}, Measure(format="fp8_block", tokens=[1]))
    assert [len(document["layers"]) for document in runs] == [1, 2]


def test_a_wrong_result_of_ours_is_an_error_and_that_of_a_peer_a_refusal(on_cpu, monkeypatch):
    contenders_are(monkeypatch, broken=broken)
    measure = Measure(format="fp8_block", tokens=[1], against=["broken"])
    layer = list(bench_experts({"small": SMALL}, measure))[-1]["layers"][0]
    assert list(layer["cells"][0]["times"]) == [OURS]
    assert "broken at 1 tokens is not what the experts compute" in layer["refusals"]["broken"]
    monkeypatch.setattr(experts, "capturable", lambda module: Scaled(module, 2))
    with pytest.raises(NumericsError, match="moequant at 1 tokens is not what the experts"):
        next(bench_experts({"small": SMALL}, Measure(format="fp8_block", tokens=[1])))


def test_ours_may_differ_by_as_much_as_its_activations_explain(on_cpu, monkeypatch):
    # One percent is 5e-5 in calc_diff.
    monkeypatch.setattr(experts, "capturable", lambda module: Scaled(module, 1.01))
    next(bench_experts({"small": SMALL}, Measure(format="fp8_block", tokens=[1])))
    with pytest.raises(NumericsError, match=r"calc_diff 5e-05, at most 2e-05"):
        next(bench_experts({"small": SMALL}, Measure(format="mxfp4", tokens=[1])))


class Scaled(FusedExperts):
    def __init__(self, module, factor):
        super().__init__(module.weights)
        self.factor = factor

    def forward(self, *call):
        return self.factor * super().forward(*call)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_a_wrong_result_wherever_it_is(value):
    got = torch.ones(40, 4)
    pick = checked_tokens(40, CPU)
    check_output("it", got, got[pick], pick, most=1)
    got[1, 1] = value
    assert 1 not in pick
    with pytest.raises(NumericsError, match="not finite"):
        check_output("it", got, got[pick], pick, most=1)


def test_what_cannot_be_measured_is_refused_before_anything_is(on_cpu, monkeypatch):
    monkeypatch.setattr(experts, "measure_ceilings", None)
    shapes = {"small": SMALL, "odd": dataclasses.replace(SMALL, hidden=96)}
    for measure, error, reason in (
        (
            Measure(format="fp8_block", tokens=[1], against=["vlm"]),
            ArgumentError,
            "unknown contender 'vlm'; use one of: ",
        ),
        (Measure(tokens=[1], format="w4a8"), UnsupportedError, "96"),
        (
            Measure(tokens=[1], format="mxfp4", routings=["hot"]),
            ArgumentError,
            "unknown routing 'hot'; use one of: uniform, skewed, one-expert",
        ),
        (
            Measure(tokens=[1], format="mxfp4", activations="fp8"),
            UnsupportedError,
            "activations is 'fp8', but must be",
        ),
        (
            Measure(format="fp8_block", tokens=[1], stages=True),
            UnsupportedError,
            "'torch_reference' does not say which launches",
        ),
    ):
        with pytest.raises(error, match=reason):
            next(bench_experts(shapes, measure))


def test_gpt_oss_is_timed_with_its_function_and_biases_and_without_peers_that_have_none():
    assert SHAPES["gpt-oss-120b"].act_fn == SWIGLUOAI
    shape = dataclasses.replace(SHAPES["gpt-oss-120b"], experts=2, hidden=32, intermediate=32)
    weights = random_experts(shape, "mxfp4", CPU)
    assert weights.act_fn == SWIGLUOAI
    assert list(weights.biases()) == ["gate_bias", "up_bias", "down_bias"]
