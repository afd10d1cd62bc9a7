"""DeepGEMM as a backend; all but the reasons for no want SM90 and the package deep_gemm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import quantize
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts, select
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, Workload
from moequant.runtime.backends.stacked import STACKED
from moequant.runtime.batched import finalize_batched, prepare_batched
from moequant.runtime.call import run_experts
from moequant.runtime.functional import deep_gemm_moe_fp8
from moequant.runtime.routing import route

NAMES = ("deepgemm", "deepgemm_batched")
WORKLOAD = Workload(
    format="fp8_block",
    activations="fp8_group128",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)
WHY_NOT = REGISTRY["deepgemm"].supports(WORKLOAD)

# E, H, I, T; no size of the second is a multiple of 128.
SMALL, ODD = (16, 1024, 512, 4), (8, 720, 336, 2)

# As in test_sm90.py, where it is derived: tensor cores add FP8 products with about 14
# bits, which flips codes in the middle. Here the middle is rounded to bfloat16 too, which flips
# as many: ulp / 2**-9, so sqrt(2**-9 * 2**-3.5) = 1.3 % more, calc_diff 1e-4.
CALC_DIFF = 1e-3

ACT_FNS = [
    SWIGLUOAI,
    SITU,
    RELU2,
    ActFn(name="gelu"),
    ActFn(name="swiglustep", limit=0.7),
    ActFn(name="gelu_tanh", gated=False, limit=0.7),
]


def gpu(test):
    test = pytest.mark.skipif(WHY_NOT is not None, reason=f"deepgemm {WHY_NOT}")(test)
    return pytest.mark.gpu(test)


def weights_of(shape, act_fn=SILU, biases=False):
    E, H, I, _ = shape
    g = torch.Generator("cuda").manual_seed(0)
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del sizes["gate"]
    parts = {"gate": None}
    for name, size in sizes.items():
        w = torch.randn(size, generator=g, device="cuda") * size[2] ** -0.5
        parts[name] = quantize(w, "fp8_block")
        if biases:
            parts[f"{name}_bias"] = torch.randn(size[:2], generator=g, device="cuda")
    return ExpertWeights(**parts, act_fn=act_fn)


def inputs(shape, M, dtype=torch.bfloat16):
    E, H, _, T = shape
    g = torch.Generator("cuda").manual_seed(M)
    hidden = torch.randn(M, H, generator=g, device="cuda").to(dtype)
    topk_weights, ids = torch.rand(M, E, generator=g, device="cuda").topk(T)
    ids[torch.rand(M, T, generator=g, device="cuda") < 0.2] = -1
    return hidden, topk_weights, ids.int()


def check(got, weights, call, **options):
    want = FusedExperts(weights, backend="torch_reference")(*call, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    assert not want.any() or calc_diff(got, want) <= CALC_DIFF


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "nvfp4", "activations": "none"}, "runs only fp8_block"),
        ({"activations": "none"}, "takes only activations in fp8_group128"),
        ({"hidden": 264}, "needs H to be a multiple of 16"),
        ({"intermediate": 100}, "needs I to be a multiple of 16"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_what_it_cannot_run_it_refuses_with_the_reason(name, change, reason):
    assert reason in REGISTRY[name].supports(replace(WORKLOAD, **change))
    with pytest.raises(UnsupportedError, match=reason):
        select(replace(WORKLOAD, **change), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_no_function_or_bias_is_a_reason_for_no(name, act_fn, bias):
    asked = replace(WORKLOAD, act_fn=act_fn, bias=bias)
    assert REGISTRY[name].supports(asked) == REGISTRY[name].supports(WORKLOAD)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_never_chosen_unasked(name):
    assert REGISTRY[name].default_on == ()


def test_the_call_without_a_module_says_why_it_cannot_run_here():
    w13, w2 = (torch.zeros(2, 256, 128).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
    call = (torch.zeros(3, 128), w13, w2.mT, *scales, torch.ones(3, 1), torch.zeros(3, 1))
    with pytest.raises(UnsupportedError, match=r"w13 is \[2, 256, 128\] and w2 \[2, 128, 256\]"):
        deep_gemm_moe_fp8(*call)
    with pytest.raises(UnsupportedError, match="deep_gemm_moe_fp8 needs a CUDA device"):
        deep_gemm_moe_fp8(*call[:2], w2[:, :128].mT[:, :, :128], *call[3:])


@gpu
@pytest.mark.parametrize("M", [0, 1, 40, 500])
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_it_computes_what_the_reference_does(shape, M):
    weights, call = weights_of(shape), inputs(shape, M)
    check(FusedExperts(weights, backend="deepgemm")(*call), weights, call)


@gpu
@pytest.mark.parametrize("M", [1, 100])
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_batches_do_too(shape, M):
    weights, (hidden, topk_weights, ids) = weights_of(shape), inputs(shape, M)
    routing = route(topk_weights, ids, experts=shape[0])
    tokens, places = prepare_batched(
        hidden, routing, experts=shape[0], capacity=M, scheme="fp8_group128"
    )
    tokens.scale[torch.arange(M, device="cuda")[None, :] >= tokens.counts[:, None]] = torch.nan
    rows = pack_experts(weights, backend="deepgemm_batched").run_batches(tokens)
    got = finalize_batched(rows, routing, places).to(hidden.dtype)
    check(got, weights, (hidden, topk_weights, ids))


@gpu
def test_it_computes_other_functions_and_for_every_dtype():
    weights = weights_of(SMALL, SWIGLUOAI)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call = inputs(SMALL, 30, dtype)
        check(FusedExperts(weights, backend="deepgemm")(*call), weights, call)


@gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_it_computes_every_function_with_and_without_biases(act_fn, biases):
    for shape, M in ((SMALL, 60), (ODD, 300)):
        weights, call = weights_of(shape, act_fn, biases), inputs(shape, M)
        check(FusedExperts(weights, backend="deepgemm")(*call), weights, call)


@gpu
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_batches_do_so_too(act_fn):
    weights, call = weights_of(ODD, act_fn, biases=True), inputs(ODD, 40)
    check(FusedExperts(weights, backend="deepgemm_batched")(*call), weights, call)


@gpu
@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
def test_no_weight_is_there_twice(act_fn):
    module = FusedExperts(weights_of(ODD, act_fn), backend="deepgemm")
    module(*inputs(ODD, 4))
    w13 = module.packed().tensors["w13_qdata"]
    assert module.weights.up.qdata.untyped_storage().data_ptr() == w13.untyped_storage().data_ptr()


@gpu
def test_it_takes_the_ids_of_other_ranks_and_weights_the_input():
    weights = weights_of(SMALL)
    hidden, topk_weights, ids = inputs((64, 1024, 512, 1), 50)
    here = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").int()
    for on_input in (False, True):
        options = {"expert_map": here, "apply_router_weight_on_input": on_input}
        call = (hidden, topk_weights, ids)
        check(FusedExperts(weights, backend="deepgemm")(*call, **options), weights, call, **options)


@gpu
def test_no_buffer_is_read_before_it_is_written():
    weights = weights_of(SMALL, SWIGLUOAI, biases=True)
    packed = pack_experts(weights, backend="deepgemm")
    for M in (1, 300):
        call = inputs(SMALL, M)
        size = packed.workspace_bytes(M, SMALL[3])
        # Bytes of 0x7F are NaN in E4M3, huge numbers in float32, and absurd indices.
        for byte in (0x7F, 0xFF):
            memory = torch.full((size,), byte, dtype=torch.uint8, device="cuda")
            out = run_experts(packed, *call, workspace=memory)
            check(out, weights, call)


@gpu
def test_a_captured_call_is_replayed_on_new_inputs_to_the_same_bits():
    module = FusedExperts(weights_of(SMALL), backend="deepgemm")
    static = inputs(SMALL, 64)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for seed in (64, 65):
        new = tuple(t[:64] for t in inputs(SMALL, seed))
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        graph.replay()
        assert torch.equal(out, module(*new))
        assert torch.equal(out, module(*new))


@gpu
def test_the_call_without_a_module_gives_the_same_bits():
    weights, (hidden, topk_weights, ids) = weights_of(ODD), inputs(ODD, 40)
    want = FusedExperts(weights, backend="deepgemm")(hidden, topk_weights, ids)
    w = STACKED.pack(weights)
    parts = tuple(w[name] for name in ("w13_qdata", "w2_qdata", "w13_scale", "w2_scale"))
    assert torch.equal(deep_gemm_moe_fp8(hidden, *parts, topk_weights, ids), want)
    with pytest.raises(CheckpointError, match="w13_scale is"):
        deep_gemm_moe_fp8(hidden, *parts[:2], w["w2_scale"], w["w2_scale"], topk_weights, ids)


@gpu
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(shape):
    hidden, topk_weights, ids = inputs(shape, 60)
    module = FusedExperts(weights_of(shape), backend="deepgemm")
    x = quantize_activations(hidden, "fp8_group128")
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, module(hidden, topk_weights, ids))
