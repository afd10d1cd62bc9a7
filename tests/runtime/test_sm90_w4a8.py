"""The W4A8 kernels for Hopper as a backend; all but the reasons for no want a device of SM90."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, quantize
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts, select
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, Workload
from moequant.runtime.workspace import shared_workspace

NAME = "sm90_w4a8"
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WORKLOAD = Workload(
    format="w4a8",
    activations="fp8_token",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)

# E, H, I, T. In the second, H and I are odd multiples of 128: half of the last unit of w2 is none.
SMALL, ODD, QWEN3_30B = (16, 1024, 512, 4), (8, 640, 384, 2), (128, 2048, 768, 8)
REAL = {
    "qwen3-30b": QWEN3_30B,
    "qwen3-235b": (128, 4096, 1536, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
}

# Both sides quantize the hidden states to the same bits (tests/kernels). From there they differ by
# sums: tensor cores add FP8 products with about 14 bits, and what lies between the GEMMs is rounded
# to bfloat16, each a relative error d of about 1e-3 in front of the middle quantization. It flips
# a code with probability d / ulp (E4M3: ulp about 2**-3.5), and each flip costs an ulp:
# sqrt(2 * d * ulp) = 1.3 % of error, calc_diff = error**2 / 2 = 9e-5. Few values flip where tokens
# are few, so it scatters; 6e-5 to 2e-4 were measured.
CALC_DIFF = 1e-3
# Of the largest value: five of the errors above, where output elements are normal.
OUTLIER = 0.06

# What a test of every tiling runs; splits are those of the first and the second GEMM.
TILINGS = [
    {"rows": 8},
    {"rows": 8, "split13": 2, "split2": 4},
    {"rows": 16, "split13": 4, "split2": 2},
    {"rows": 32},
    {"rows": 48},
    {"rows": 48, "gather": True},
    {"rows": 64},
    {"rows": 64, "gather": True},
    {"rows": 96},
    {"rows": 96, "pair": True},
    {"rows": 128},
    {"rows": 128, "pair": True},
]
every_tiling = pytest.mark.parametrize(
    "choice", TILINGS, ids=lambda choice: "-".join(map(str, choice.values()))
)


def gpu(test):
    test = pytest.mark.skipif(not HERE, reason="needs a CUDA device of SM90")(test)
    return pytest.mark.gpu(test)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "nvfp4", "activations": "none"}, "runs w4a8 alone"),
        ({"activations": "none"}, "activations in fp8_token alone"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_what_it_cannot_run_it_refuses_with_the_reason(change, reason):
    assert reason in REGISTRY[NAME].supports(replace(WORKLOAD, **change))
    with pytest.raises(UnsupportedError, match=reason):
        select(replace(WORKLOAD, **change), NAME)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so():
    assert REGISTRY[NAME].supports(WORKLOAD) == "finds no CUDA device"


@gpu
def test_it_is_the_default_where_it_runs():
    assert select(WORKLOAD).name == NAME


@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2, ActFn(name="gelu", gated=False)])
@pytest.mark.parametrize("bias", [False, True])
def test_no_activation_function_or_bias_is_a_reason_for_no(act_fn, bias):
    asked = replace(WORKLOAD, act_fn=act_fn, bias=bias)
    assert REGISTRY[NAME].supports(asked) == REGISTRY[NAME].supports(WORKLOAD)


def layer_on(device, shape, act_fn=SILU, bias=False):
    """Experts of random codes and scales, which take less time and memory than quantized ones."""
    E, H, I, _ = shape
    g = torch.Generator(device).manual_seed(0)
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del sizes["gate"]

    def projection(size):
        *rows, K = size
        codes = torch.empty(*rows, K // 2, dtype=torch.uint8, device=device)
        codes.random_(0, 256, generator=g)
        scale = torch.rand(*rows, K // 128, generator=g, device=device) + 0.5
        return QuantizedWeight(
            format="w4a8",
            qdata=codes,
            scale=(scale * 0.2 * K**-0.5).bfloat16(),
            global_scale=None,
            shape=torch.Size(size),
        )

    weights = {name: projection(size) for name, size in sizes.items()}
    biases = {
        f"{name}_bias": torch.randn(size[:2], generator=g, device=device) / 2
        for name, size in sizes.items()
        if bias
    }
    return ExpertWeights(**{"gate": None, **weights, **biases}, act_fn=act_fn)


@pytest.mark.parametrize("act_fn", [SWIGLUOAI, RELU2], ids=str)
def test_its_layout_has_every_tensor_expert_by_expert(act_fn):
    layer = layer_on("cpu", (3, 256, 128, 1), act_fn, bias=True)
    layout = REGISTRY[NAME].layout
    tensors = layout.pack(layer)
    halves = 2 if act_fn.gated else 1
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "w13_panels": (3, halves, 2, 8448),
        "w2_panels": (3, 2, 1, 8448),
        "w13_bias": (3, halves * 128),
        "w2_bias": (3, 256),
    }
    assert torch.equal(tensors["w13_bias"][:, -128:], layer.up_bias)
    for expert in range(3):
        one = experts_of(layer, torch.tensor([[expert]]))[0]
        alone = layout.pack(
            replace(
                one, **{n: b[expert : expert + 1] for n, b in layer.biases().items()}, act_fn=act_fn
            )
        )
        assert all(torch.equal(alone[name][0], tensors[name][expert]) for name in tensors)


def test_its_layout_refuses_what_it_does_not_hold():
    w = quantize(torch.ones(2, 128, 128), "fp8_block")
    with pytest.raises(UnsupportedError, match="holds w4a8, but these weights are fp8_block"):
        REGISTRY[NAME].layout.pack(ExpertWeights(gate=w, up=w, down=w))


@pytest.fixture(scope="module")
def weights():
    """weights(shape): experts on the device; the same arguments give the same."""
    made = {}

    def make(*arguments):
        if arguments not in made:
            made[arguments] = layer_on("cuda", *arguments)
        return made[arguments]

    return make


def check(weights, call, **options):
    """The output, compared with the float32 reference on the same device."""
    got = FusedExperts(weights, backend=NAME)(*call, **options)
    want = FusedExperts(weights, backend="torch_reference")(*call, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype == call[0].dtype
    assert bool(got.isfinite().all())
    if want.any():
        assert calc_diff(got, want) <= CALC_DIFF
        assert (got.float() - want.float()).abs().max() <= OUTLIER * want.float().abs().max()
    else:
        assert not got.any()
    return got


@gpu
@pytest.mark.parametrize("M", [0, 1, 3, 8, 32, 128, 512])
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_it_computes_what_the_reference_does(weights, inputs, shape, M):
    check(weights(shape), inputs(shape, M))


@gpu
@pytest.mark.parametrize("kind", ["skewed", "holes", "one expert", "nowhere"])
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 5), (ODD, 200), (SMALL, 700)])
def test_it_does_for_every_kind_of_routing(weights, inputs, shape, M, kind):
    call = inputs(shape, M, kind)
    got = check(weights(shape), call)
    assert not got[(call[2] < 0).all(1)].any()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float16, torch.float32])
def test_it_takes_every_dtype(weights, inputs, dtype, router):
    for M in (5, 20):  # up to 32 pairs, the first GEMM reads the ids too
        hidden, topk_weights, ids = inputs(SMALL, M, dtype=dtype)
        check(weights(SMALL), (hidden, topk_weights.to(router), ids.long()))


@gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("M", [2, 50, 700])
def test_it_takes_the_ids_of_other_ranks(weights, inputs, M, dtype):
    hidden, topk_weights, ids = inputs((64, *SMALL[1:]), M)
    here = torch.full((64,), -1, dtype=dtype, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").to(dtype)
    check(weights(SMALL), (hidden, topk_weights, ids), expert_map=here)


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_ids_out_of_range_contribute_nothing_and_nothing_waits_for_the_device(weights, inputs):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = FusedExperts(weights(SMALL))
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
def test_nan_stays_in_its_own_token(weights, inputs):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = FusedExperts(weights(SMALL))
    clean = module(hidden, topk_weights, ids)
    hidden[7, 3], hidden[9, 500] = torch.nan, torch.inf
    got = module(hidden, topk_weights, ids)
    assert bool(got[[7, 9]].isnan().all())
    others = [m for m in range(40) if m not in (7, 9)]
    assert torch.equal(got[others], clean[others])


@gpu
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 1), (ODD, 33), (QWEN3_30B, 512)])
def test_runs_of_one_call_are_bitwise_equal(weights, inputs, shape, M):
    module = FusedExperts(weights(shape))
    call = inputs(shape, M, "skewed")
    first = module(*call)
    for _ in range(20):
        assert torch.equal(module(*call), first)


ACT_FNS = [
    ActFn(name="gelu"),
    ActFn(name="silu", limit=0.7),
    ActFn(name="swigluoai", alpha=1.702, limit=0.7),
    SITU,
    ActFn(name="gelu", gated=False, limit=0.7),
    RELU2,
]


@gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_it_computes_every_activation_function(weights, inputs, act_fn, bias):
    # Without a gate, 384 columns are a unit and a half. Tiles of 8 and 128 rows.
    for M in (6, 700):
        check(weights(ODD, act_fn, bias), inputs(ODD, M))


@gpu
@pytest.mark.parametrize("M", [1, 40, 500])
def test_biases_count_for_silu_too(weights, inputs, M):
    check(weights(ODD, SILU, True), inputs(ODD, M, "skewed"))


def run_plan(layer, call, choice, *, byte):
    """A call with a tiling, and a workspace and an output full of `byte` and NaN."""
    from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import W4a8Plan, workspace_bytes
    from moequant.kernels.sm90_w4a8.tiling import W4a8Tiling

    packed = pack_experts(layer, backend=NAME).kernel_weights
    M, T = call[2].shape
    tiling = W4a8Tiling(**choice)
    size_bytes = workspace_bytes(packed, M, T, tiling)
    workspace = torch.full((size_bytes,), byte, dtype=torch.uint8, device="cuda")
    out = torch.full_like(call[0], torch.nan)
    W4a8Plan(packed, M, T, workspace=workspace, tiling=tiling)(*call, out)
    return out


@gpu
@pytest.mark.parametrize("byte", [0x7F, 0xFF], ids=["huge", "nan"])
@every_tiling
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_no_buffer_is_read_before_it_is_written(weights, inputs, shape, choice, byte):
    for M in (1, 2, 50, 600, 2000):
        call = inputs(shape, M, "holes")
        out = run_plan(weights(shape), call, choice, byte=byte)
        want = FusedExperts(weights(shape), backend="torch_reference")(*call)
        assert bool(out.isfinite().all())
        assert not want.any() or calc_diff(out, want) <= CALC_DIFF


@gpu
@every_tiling
def test_every_number_of_rows_behind_whole_tiles_counts(weights, inputs, choice):
    shape, rows = (16, 1024, 512, 1), choice["rows"]
    for counts in (
        [rows - 1, rows, rows + 1, rows + 7, rows + 8, rows + 9, 2 * rows, 1],
        [3 * rows + 1, 0, 2 * rows - 1, 2 * rows + 1, 5, 17, 33, 65],
    ):
        ids = torch.arange(8).repeat_interleave(torch.tensor(counts))
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
        hidden, topk_weights, _ = inputs(shape, len(ids))
        call = hidden, topk_weights, ids[:, None].int().cuda()
        out = run_plan(weights(shape), call, choice, byte=0xFF)
        want = FusedExperts(weights(shape), backend="torch_reference")(*call)
        for expert in range(8):
            of_expert = ids == expert
            assert not counts[expert] or calc_diff(out[of_expert], want[of_expert]) <= CALC_DIFF


def experts_of(weights, ids):
    """The layer with only the experts that `ids` names, and `ids` among these."""
    used, among = ids.clamp(min=0).unique(return_inverse=True)
    parts = {
        name: q.map(lambda t: t[used], torch.Size((len(used), *q.shape[1:])))
        for name, q in weights.projections().items()
    }
    return ExpertWeights(**{"gate": None, **parts}, act_fn=weights.act_fn), among.reshape(
        ids.shape
    ).int().masked_fill(ids < 0, -1)


@gpu
@pytest.mark.parametrize("name", REAL)
def test_it_does_on_the_shapes_of_real_models(inputs, name):
    """Each M and kind of routing; of many tokens, a few are compared.

    Activations are those of the whole call: a token's output depends on no other token.
    """
    shape = REAL[name]
    layer = layer_on("cuda", shape)
    module = FusedExperts(layer)
    for M in (0, 1, 3, 8, 32, 128, 512, 2048, 8192):
        for kind in ("uniform", "skewed", "one expert") if M in (3, 512, 8192) else ("uniform",):
            hidden, topk_weights, ids = inputs(shape, M, kind)
            got = module(hidden, topk_weights, ids)
            assert got.shape == hidden.shape
            if M == 0:
                continue
            assert bool(got.isfinite().all())
            some = torch.arange(M, device="cuda")[:: max(M // 4, 1)]
            few, among = experts_of(layer, ids[some])
            want = FusedExperts(few, backend="torch_reference")(
                hidden[some], topk_weights[some], among
            )
            assert calc_diff(got[some], want) <= CALC_DIFF, (M, kind)


@gpu
def test_more_pairs_than_the_sort_takes_run_in_parts(weights, inputs):
    from moequant.kernels.routing import MAX_SLOTS

    check(weights(SMALL), inputs(SMALL, MAX_SLOTS // SMALL[3] + 40))


@gpu
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 1), (ODD, 64), (QWEN3_30B, 512)])
def test_a_captured_call_is_replayed_on_new_inputs(weights, inputs, shape, M):
    module = FusedExperts(weights(shape))
    static = inputs(shape, M)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for kind in ("skewed", "holes", "uniform"):
        new = inputs(shape, M, kind)
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        # Calls of other sizes in between take and leave memory of their own.
        module(*inputs(shape, 2 * M + 1))
        graph.replay()
        assert torch.equal(out, module(*new))


@gpu
def test_packed_weights_are_saved_and_loaded(weights, inputs):
    call = inputs(SMALL, 16)
    module = FusedExperts(copy.deepcopy(weights(SMALL)))
    first = module(*call)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    assert state.keys() == {"w13_panels", "w2_panels"}
    for tensor in module.buffers():
        tensor.zero_()
    assert not module(*call).any()
    module.load_state_dict(state)
    assert torch.equal(module(*call), first)


@gpu
@pytest.mark.parametrize("M", [1, 3, 8, 32, 128, 512, 3000])
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, inputs, shape, M
):
    hidden, topk_weights, ids = inputs(shape, M, "holes")
    module = FusedExperts(weights(shape), backend=NAME)
    x = quantize_activations(hidden, "fp8_token")
    want = module(hidden, topk_weights, ids)
    shared_workspace(hidden.device, 0).fill_(0x7F)
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, want)
