"""CUTLASS as a backend; all but the reasons for no want SM90 and the package nvidia-cutlass-dsl."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.errors import UnsupportedError
from moequant.formats import quantize
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts, select
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, Workload, cutlass_fp8
from moequant.runtime.batched import finalize_batched, prepare_batched
from moequant.runtime.call import run_experts
from moequant.runtime.routing import route

NAMES = ("cutlass_fp8", "cutlass_fp8_batched")
WORKLOAD = Workload(
    format="fp8_channel",
    activations="fp8_token",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)
WHY_NOT = REGISTRY["cutlass_fp8"].supports(WORKLOAD)

# E, H, I, T; no size of the second is a multiple of 128.
SMALL, ODD = (16, 1024, 512, 4), (8, 720, 336, 2)
QWEN3_30B = (128, 2048, 768, 8)

# The bounds of test_sm90.py for FP8 activations, derived from d, the relative error of the values
# that the middle quantization reads.
#
# WGMMA aligns 32 products and the sum so far to the largest of these 33 terms, and cuts off what is
# below 2**-13 of it (14 bits are kept: DeepSeek-V3's report, section 3.3.2). Of products of either
# sign, the largest term is the sum, sqrt(K) of a product, and what is cut off a term is uniform: an
# error of 2**-13 / sqrt(3) of the sum for each of 33 terms in each of K / 32 instructions, in all
# 2**-13 * sqrt(33 / 32 / 3 * K) of the norm. For the 128 columns of a promoted part that is 8e-4,
# and a sum of parts, which float32 adds, has the same relative error whatever K is. Without
# promotion it is 3e-3 for K = 2048. Rounding to bfloat16 adds 2**-9 / sqrt(3): d = 1.4e-3, an error
# of sqrt(2 * d * 2**-3.5) = 1.6 %, calc_diff 1.2e-4 (3e-4 without promotion), and scatters as
# described there.
CALC_DIFF = 1e-3
OUTLIER = 0.06

ACT_FNS = [
    SWIGLUOAI,
    SITU,
    RELU2,
    ActFn(name="gelu"),
    ActFn(name="swiglustep", limit=0.7),
    ActFn(name="gelu_tanh", gated=False, limit=0.7),
]


def gpu(test):
    test = pytest.mark.skipif(WHY_NOT is not None, reason=f"cutlass_fp8 {WHY_NOT}")(test)
    return pytest.mark.gpu(test)


@pytest.fixture(scope="module")
def weights():
    """weights(shape, act_fn, biases): experts on the GPU; the same arguments give the same."""
    made = {}

    def make(*arguments):
        if arguments not in made:
            made[arguments] = weights_of(*arguments)
        return made[arguments]

    return make


def weights_of(shape, act_fn=SILU, biases=False):
    E, H, I, _ = shape
    g = torch.Generator("cuda").manual_seed(0)
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del sizes["gate"]
    parts = {"gate": None}
    for name, size in sizes.items():
        w = torch.randn(size, generator=g, device="cuda") * size[2] ** -0.5
        parts[name] = quantize(w, "fp8_channel", scale="float32")
        if biases:
            parts[f"{name}_bias"] = torch.randn(size[:2], generator=g, device="cuda")
    return ExpertWeights(**parts, act_fn=act_fn)


def check(got, layer, call, **options):
    want = FusedExperts(layer, backend="torch_reference")(*call, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    if want.any():
        assert calc_diff(got, want) <= CALC_DIFF
        most = OUTLIER * want.float().abs().max()
        assert (got.float() - want.float()).abs().max() <= most
    else:
        assert not got.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "nvfp4", "activations": "none"}, "runs only fp8_channel"),
        ({"activations": "fp8_static"}, "takes only activations in fp8_token"),
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


def test_without_the_package_it_says_what_to_install(monkeypatch):
    pytest.importorskip("triton")

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cutlass_fp8, "version", absent)
    reason = cutlass_fp8.why_no_cute_dsl()
    assert reason == "needs the package nvidia-cutlass-dsl: pip install 'moequant[cutlass]'"


def test_half_an_installation_is_told_apart(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(cutlass_fp8, "version", lambda name: "4.8.1")
    monkeypatch.setattr(cutlass_fp8, "find_spec", lambda name: None)
    assert "without its module cutlass" in cutlass_fp8.why_no_cute_dsl()


@gpu
@pytest.mark.parametrize("M", [0, 1, 3, 8, 32, 128, 512, 2048])
@pytest.mark.parametrize("shape", [SMALL, ODD, QWEN3_30B], ids=str)
def test_it_computes_what_the_reference_does(weights, inputs, shape, M):
    layer, call = weights(shape), inputs(shape, M)
    check(FusedExperts(layer, backend="cutlass_fp8")(*call), layer, call)


@gpu
@pytest.mark.parametrize("kind", ["skewed", "holes", "one expert", "nowhere"])
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 5), (ODD, 200), (SMALL, 700)])
def test_it_does_for_every_kind_of_routing(weights, inputs, shape, M, kind):
    layer, call = weights(shape), inputs(shape, M, kind)
    check(FusedExperts(layer, backend="cutlass_fp8")(*call), layer, call)


@gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_it_computes_every_function_with_and_without_biases(weights, inputs, act_fn, biases):
    for shape, M in ((SMALL, 60), (ODD, 300)):
        layer, call = weights(shape, act_fn, biases), inputs(shape, M)
        check(FusedExperts(layer, backend="cutlass_fp8")(*call), layer, call)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_takes_every_dtype(weights, inputs, dtype):
    hidden, topk_weights, ids = inputs(SMALL, 30, dtype=dtype)
    call = (hidden, topk_weights.to(dtype), ids.long())
    check(FusedExperts(weights(SMALL), backend="cutlass_fp8")(*call), weights(SMALL), call)


@gpu
def test_it_takes_the_ids_of_other_ranks_and_weights_the_input(weights, inputs):
    layer, call = weights(SMALL), inputs((64, *SMALL[1:3], 1), 50)
    here = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").int()
    for on_input in (False, True):
        options = {"expert_map": here, "apply_router_weight_on_input": on_input}
        got = FusedExperts(layer, backend="cutlass_fp8")(*call, **options)
        check(got, layer, call, **options)


@gpu
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("tile_rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=str)
def test_every_variant_reads_no_buffer_before_it_is_written(
    weights, inputs, shape, tile_rows, promote
):
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.cutlass.sm90_fp8_channel_fused import CutlassPlan
    from moequant.kernels.cutlass.variant import GemmVariant

    layer = weights(shape)
    tensors = pack_experts(layer, backend="cutlass_fp8").tensors
    variant = GemmVariant(tile_rows=tile_rows, promote=promote)
    for M in (1, 2, 50, 600):
        call = inputs(shape, M, "holes")
        plan = (tensors, SILU, M, shape[3])
        size = WorkspaceArena()
        CutlassPlan(*plan, size, variant=variant)
        # Bytes of 0x7F are NaN in E4M3, huge numbers in float32, and absurd indices.
        for byte in (0x7F, 0xFF):
            memory = torch.full((size.size_bytes,), byte, dtype=torch.uint8, device="cuda")
            out = torch.full_like(call[0], torch.nan)
            CutlassPlan(*plan, WorkspaceArena(memory), variant=variant)(*call, out)
            check(out, layer, call)


@gpu
def test_a_workspace_of_the_caller_is_enough(weights, inputs):
    packed = pack_experts(weights(SMALL), backend="cutlass_fp8")
    for M in (1, 300):
        call = inputs(SMALL, M)
        size = packed.workspace_bytes(M, SMALL[3])
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        check(run_experts(packed, *call, workspace=memory), weights(SMALL), call)


@gpu
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 1), (ODD, 33), (QWEN3_30B, 512)], ids=str)
def test_runs_of_one_call_are_bitwise_equal(weights, inputs, shape, M):
    module, call = FusedExperts(weights(shape), backend="cutlass_fp8"), inputs(shape, M, "skewed")
    first = module(*call)
    for _ in range(20):
        assert torch.equal(module(*call), first)


@gpu
def test_a_captured_call_is_replayed_on_new_inputs_to_the_same_bits(weights, inputs):
    module, static = FusedExperts(weights(SMALL), backend="cutlass_fp8"), inputs(SMALL, 64)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for kind in ("skewed", "holes", "uniform"):
        new = inputs(SMALL, 64, kind)
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        graph.replay()
        assert torch.equal(out, module(*new))


@gpu
def test_a_second_call_encodes_no_tensor_map(weights, inputs, monkeypatch):
    from moequant.kernels.cutlass import grouped_gemm

    module = FusedExperts(weights(SMALL), backend="cutlass_fp8")
    module(*inputs(SMALL, 64))
    monkeypatch.delattr(grouped_gemm, "tensor_map")
    for kind in ("skewed", "holes"):
        call = inputs(SMALL, 64, kind)
        check(module(*call), weights(SMALL), call)


@gpu
def test_calls_from_threads_on_streams_of_their_own_do_not_meet(weights, inputs):
    module = FusedExperts(weights(SMALL), backend="cutlass_fp8")
    calls = [inputs(SMALL, 64, kind) for kind in ("uniform", "skewed", "holes")]
    want = [module(*call) for call in calls]
    torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [module(*calls[i]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(result, want[i]) for result in got)

    with ThreadPoolExecutor(len(calls)) as pool:
        assert all(pool.map(run, range(len(calls))))


@gpu
@pytest.mark.parametrize("M", [3, 60, 2000])
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, inputs, M
):
    hidden, topk_weights, ids = inputs(ODD, M, "holes")
    module = FusedExperts(weights(ODD), backend="cutlass_fp8")
    x = quantize_activations(hidden, "fp8_token")
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, module(hidden, topk_weights, ids))


@gpu
@pytest.mark.parametrize("M", [1, 100, 300])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=str)
def test_batches_compute_what_the_reference_does(weights, inputs, shape, M):
    layer, (hidden, topk_weights, ids) = weights(shape), inputs(shape, M)
    routing = route(topk_weights, ids, experts=shape[0])
    tokens, places = prepare_batched(
        hidden, routing, experts=shape[0], capacity=M, scheme="fp8_token"
    )
    tokens.scale[torch.arange(M, device="cuda")[None, :] >= tokens.counts[:, None]] = torch.nan
    rows = pack_experts(layer, backend="cutlass_fp8_batched").run_batches(tokens)
    got = finalize_batched(rows, routing, places).to(hidden.dtype)
    check(got, layer, (hidden, topk_weights, ids))


@gpu
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_batches_compute_every_function_with_biases(weights, inputs, act_fn):
    layer, call = weights(ODD, act_fn, True), inputs(ODD, 40)
    check(FusedExperts(layer, backend="cutlass_fp8_batched")(*call), layer, call)
