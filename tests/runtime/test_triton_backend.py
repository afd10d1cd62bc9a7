"""The portable kernels as a backend, in every format; all but the reasons for no want a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE as FORMATS
from moequant.formats import RUNNABLE, get_format
from moequant.formats.elements import E4M3
from moequant.formats.fp8_channel import Fp8Channel
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts, select
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, Workload
from moequant.runtime.backends.triton_portable import is_decoded
from moequant.runtime.call import run_experts
from moequant.runtime.warm_up import warm_up

NAME = "triton"
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
WORKLOAD = Workload(
    format="mxfp4",
    activations="none",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)
EVERY = RUNNABLE

# E, H, I, T.
SMALL = (16, 1024, 512, 4)
# Sizes of which no block is complete, as gpt-oss (2880) has them; w4a8 wants multiples of 128.
ODD = {
    "fp8_block": (8, 720, 336, 2),
    "w4a8": (8, 640, 384, 2),
    **dict.fromkeys(("nvfp4", "mxfp4", "mxfp8"), (8, 736, 352, 2)),
    **dict.fromkeys(RUNNABLE.keys() - FORMATS.keys(), (8, 717, 333, 2)),
    **dict.fromkeys(("fp8_channel", "fp8_tensor"), (8, 717, 333, 2)),
}

# For float32 hidden states nothing is rounded but sums. As a random walk of K <= 1024 terms a sum
# is off by sqrt(K) 2**-24 = 2e-6 of its norm, tensor cores that cut each addition off after 24 bits
# by K / 16 * 2**-24 = 4e-6 (products come in sixteens); two GEMMs and the reduction: 1e-5.
EXACT = 2e-5
# For bfloat16 hidden states the values between the GEMMs, each expert's result and both outputs are
# rounded to bfloat16, by 2**-9 / sqrt(3) = 1.1e-3 of the norm each: 2.3e-3 together.
ROUNDED = 4e-3
# Of what is quantized in the middle, a fraction d / ulp of the codes flips for a relative error d =
# 4e-6 in front (E4M3: ulp about 2**-3.5), and a flip costs an ulp: sqrt(d * ulp) = 6e-4. Few values
# flip where tokens are few, so it scatters: eight times that.
QUANTIZED = 5e-3


def gpu(test):
    test = pytest.mark.skipif(not HERE, reason="needs a CUDA device of SM80 or newer")(test)
    return pytest.mark.gpu(test)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "int2"}, "cannot decode int2"),
        ({"activations": "fp4_group16"}, "cannot quantize activations to fp4_group16"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_what_it_cannot_run_it_refuses_with_the_reason(change, reason):
    assert reason in REGISTRY[NAME].supports(replace(WORKLOAD, **change))
    with pytest.raises(UnsupportedError, match=reason):
        select(replace(WORKLOAD, **change), NAME)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "fact",
    [
        {"element": replace(E4M3, name="e5m2", dtype=torch.float8_e5m2)},
        {"scale_dtype": torch.float16},
        {"block": (1, 64)},
    ],
)
def test_a_format_with_what_its_kernels_do_not_decode_is_not_decoded(fact):
    format = type("Other", (Fp8Channel,), fact)()
    assert is_decoded(Fp8Channel())
    assert not is_decoded(format)


def test_without_a_device_it_says_so():
    assert REGISTRY[NAME].supports(WORKLOAD) == "finds no CUDA device"


@gpu
def test_it_is_the_default_where_nothing_faster_runs():
    without_kernels_of_its_own = replace(WORKLOAD, format="mxfp8")
    assert select(without_kernels_of_its_own).name == NAME
    assert select(replace(without_kernels_of_its_own, act_fn=SWIGLUOAI, bias=True)).name == NAME


@pytest.fixture(scope="module")
def weights():
    """weights(format, shape): experts on the device; equal arguments give the same."""
    made = {}

    def make(format, shape=SMALL, act_fn=SILU, biases=False):
        key = (format, shape, act_fn, biases)
        if key not in made:
            E, H, I, _ = shape
            g = torch.Generator("cuda").manual_seed(0)
            sizes = {"up": (E, I, H), "down": (E, H, I)}
            if act_fn.gated:
                sizes = {"gate": (E, I, H), **sizes}
            parts = {
                name: get_format(format).quantize(
                    torch.randn(size, generator=g, device="cuda") * size[2] ** -0.5
                )
                for name, size in sizes.items()
            }
            if biases:
                for name, size in sizes.items():
                    parts[f"{name}_bias"] = torch.randn(size[:2], generator=g, device="cuda")
            made[key] = ExpertWeights(**{"gate": None, **parts}, act_fn=act_fn)
        return made[key]

    return make


def check(weights, call, activations="format", **options):
    """The output, compared with the float32 reference on the same device."""
    modules = (
        FusedExperts(weights, backend=name, activations=activations)
        for name in (NAME, "torch_reference")
    )
    got, want = (module(*call, **options) for module in modules)
    assert got.shape == want.shape
    assert got.dtype == want.dtype == call[0].dtype
    assert bool(got.isfinite().all())
    quantized = activations == "format" and get_format(weights.format).activations != "none"
    limit = 0.0 if call[0].dtype == torch.float32 else ROUNDED
    limit += QUANTIZED if quantized else EXACT
    assert (got.float() - want.float()).norm() <= limit * want.float().norm()
    return got


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [0, 1, 40, 700])
@pytest.mark.parametrize("format", EVERY)
def test_it_computes_what_the_reference_does(weights, inputs, format, M, dtype):
    check(weights(format), inputs(SMALL, M, dtype=dtype))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", EVERY)
def test_it_does_for_activations_that_are_not_quantized(weights, inputs, format, dtype):
    check(weights(format), inputs(SMALL, 70, dtype=dtype), activations="none")


@gpu
@pytest.mark.parametrize("kind", ["uniform", "skewed", "holes", "one expert", "nowhere"])
@pytest.mark.parametrize("format", EVERY)
def test_it_does_for_every_kind_of_routing_and_incomplete_blocks(weights, inputs, format, kind):
    call = inputs(ODD[format], 130, kind)
    got = check(weights(format, ODD[format]), call)
    assert not got[(call[2] < 0).all(1)].any()


@gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "act_fn",
    [
        SWIGLUOAI,
        RELU2,
        ActFn(name="relu2"),
        ActFn(name="gelu"),
        ActFn(name="gelu_tanh", limit=1.0),
        ActFn(name="silu", gated=False),
        ActFn(name="silu", limit=0.5),
        ActFn(name="swigluoai", alpha=0.75, beta=-0.25, limit=3.0),
        ActFn(name="swiglustep", limit=0.5),
        SITU,
    ],
    ids=str,
)
@pytest.mark.parametrize("format", FORMATS)
def test_it_does_for_every_function_with_and_without_biases(
    weights, inputs, format, act_fn, biases
):
    check(weights(format, SMALL, act_fn, biases), inputs(SMALL, 50))


@gpu
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float16])
def test_it_takes_router_weights_of_every_dtype_and_strided_inputs(weights, inputs, router):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    call = (hidden, topk_weights.to(router), ids.long())
    got = check(weights("nvfp4"), call)
    strided = (t.repeat_interleave(2, 1)[:, ::2] for t in call)
    assert torch.equal(FusedExperts(weights("nvfp4"))(*strided), got)


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_it_takes_the_ids_of_other_ranks(weights, inputs, format):
    hidden, topk_weights, ids = inputs((64, *SMALL[1:]), 50)
    here = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").int()
    check(weights(format), (hidden, topk_weights, ids), expert_map=here)


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_it_weights_the_input_where_asked(weights, inputs, format):
    hidden, topk_weights, ids = inputs((16, 1024, 512, 1), 30)
    topk_weights = topk_weights * torch.rand_like(topk_weights)
    check(weights(format), (hidden, topk_weights, ids), apply_router_weight_on_input=True)


@gpu
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**60])
def test_scales_far_from_one_are_exact_too(weights, inputs, scale):
    # E8M0 exponents near the ends: weights whose products with x stay in float32's range.
    g = torch.Generator("cuda").manual_seed(0)
    sizes = {"gate": (2, 64, 64), "up": (2, 64, 64), "down": (2, 64, 64)}
    sources = {n: torch.randn(size, generator=g, device="cuda") * 0.1 for n, size in sizes.items()}
    sources["up"] *= scale
    parts = {n: get_format("mxfp4").quantize(w) for n, w in sources.items()}
    check(ExpertWeights(**parts), inputs((2, 64, 64, 1), 20, dtype=torch.float32))


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("format", FORMATS)
def test_nothing_waits_for_the_device(weights, inputs, format):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = FusedExperts(weights(format), backend=NAME)
    absent = torch.rand(ids.shape, device="cuda") < 0.5
    far = torch.tensor([16, -2, 1 << 32, -(1 << 40)], device="cuda").repeat(40, 1)
    want = module(hidden, topk_weights, ids.masked_fill(absent, -1))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = module(hidden, topk_weights, torch.where(absent, far, ids.long()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_nan_stays_in_its_own_token(weights, inputs, format):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = FusedExperts(weights(format), backend=NAME)
    clean = module(hidden, topk_weights, ids)
    hidden[7, 3], hidden[9, 500] = torch.nan, torch.inf
    got = module(hidden, topk_weights, ids)
    assert bool((~got[[7, 9]].isfinite()).all())
    others = [m for m in range(40) if m not in (7, 9)]
    assert torch.equal(got[others], clean[others])


@gpu
@pytest.mark.parametrize("M", [1, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_runs_of_one_call_are_bitwise_equal_whatever_the_buffers_hold(weights, inputs, format, M):
    packed = pack_experts(weights(format), backend=NAME)
    call = inputs(SMALL, M, "skewed")
    size = packed.workspace_bytes(M, SMALL[3])
    want = run_experts(packed, *call)
    for byte in (0x7F, 0xFF, 0x00, 0x7F):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device="cuda")
        assert torch.equal(run_experts(packed, *call, workspace=workspace), want)


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_captured_call_is_replayed_on_new_inputs(weights, inputs, format):
    module = FusedExperts(weights(format), backend=NAME)
    static = inputs(SMALL, 64)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for kind in ("skewed", "holes", "uniform"):
        new = inputs(SMALL, 64, kind)
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        module(*inputs(SMALL, 129))
        graph.replay()
        assert torch.equal(out, module(*new))


@gpu
def test_more_pairs_than_the_sort_takes_run_in_parts(weights, inputs):
    from moequant.kernels.calls import MAX_PAIRS

    call = inputs(SMALL, MAX_PAIRS // SMALL[3] + 40)
    module = FusedExperts(weights("mxfp4"), backend=NAME, max_tokens=1 << 20)
    got = module(*call)
    parts = FusedExperts(weights("mxfp4"), backend=NAME, max_tokens=5000)
    assert torch.equal(got, parts(*call))


@gpu
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_a_warm_up_compiles_all_that_a_range_of_tokens_needs(weights, inputs, format, monkeypatch):
    import triton

    module = FusedExperts(weights(format), backend=NAME)
    warm_up(module, range(1, 1200), SMALL[3])
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"])
    )
    for M in (1, 2, 3, 4, 5, 16, 20, 31, 64, 65, 100, 256, 300, 900, 1024, 1025, 1100, 1199):
        module(*inputs(SMALL, M))
    assert compiled == []


@gpu
def test_the_scheme_of_a_call_is_its_own(weights, inputs):
    module = FusedExperts(weights("fp8_block"), backend=NAME)
    call = inputs(SMALL, 20)
    quantized = module(*call)
    exact = module(*call, activations="none")
    assert not torch.equal(quantized, exact)
    assert torch.equal(exact, FusedExperts(weights("fp8_block"), activations="none")(*call))
    assert torch.equal(module(*call), quantized)


@gpu
@pytest.mark.parametrize("M", [1, 40, 700])
@pytest.mark.parametrize("format", ["fp8_block", "w4a8", "fp8_channel", "fp8_tensor"])
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, inputs, format, M
):
    hidden, topk_weights, ids = inputs(SMALL, M)
    module = FusedExperts(weights(format), backend=NAME)
    x = quantize_activations(hidden, get_format(format).activations)
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, module(hidden, topk_weights, ids))


@gpu
@pytest.mark.parametrize("backend", [NAME, "triton_batched"])
@pytest.mark.parametrize("M", [0, 1, 40, 700])
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor", "mxfp4"])
def test_one_scale_of_all_tokens_and_of_all_rows(weights, inputs, format, M, backend):
    call = inputs(SMALL, M, "holes")
    got, again, want = (
        FusedExperts(weights(format), backend=name, activations="fp8_tensor")(*call)
        for name in (backend, backend, "torch_reference")
    )
    assert torch.equal(got, again)
    assert (got.float() - want.float()).norm() <= (ROUNDED + QUANTIZED) * want.float().norm()
    nowhere = torch.full_like(call[2], -1)
    module = FusedExperts(weights(format), backend=backend, activations="fp8_tensor")
    assert not module(*call[:2], nowhere).any()
    assert not module(torch.zeros_like(call[0]), *call[1:]).any()


@gpu
def test_one_scale_is_found_within_a_graph(weights, inputs):
    module = FusedExperts(weights("fp8_tensor"), backend=NAME, activations="fp8_tensor")
    static = inputs(SMALL, 64)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for kind, factor in (("skewed", 0.01), ("holes", 100.0)):
        hidden, *routing = inputs(SMALL, 64, kind)
        for to, value in zip(static, (hidden * factor, *routing), strict=True):
            to.copy_(value)
        graph.replay()
        assert torch.equal(out, module(hidden * factor, *routing))


@gpu
@pytest.mark.parametrize("backend", [NAME, "triton_batched"])
@pytest.mark.parametrize("M", [1, 40, 700])
def test_static_scales_of_activations(weights, inputs, backend, M):
    w = replace(
        weights("fp8_tensor"),
        gate_up_input_scale=torch.full((16,), 0.01, device="cuda"),
        down_input_scale=torch.full((1,), 0.005, device="cuda"),
    )
    call = inputs(SMALL, M)
    got = FusedExperts(w, backend=backend)(*call)
    want = FusedExperts(w, backend="torch_reference")(*call)
    assert (got.float() - want.float()).norm() <= (ROUNDED + QUANTIZED) * want.float().norm()
    assert not torch.equal(got, FusedExperts(weights("fp8_tensor"), backend=backend)(*call))
