"""The FP8-block kernels as a backend; all but the reasons for no want a device of SM90."""

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

NAME = "sm90_fp8_block"
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WORKLOAD = Workload(
    format="fp8_block",
    activations="fp8_group128",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)

# E, H, I, T. The second has no size that is a multiple of 128, as gpt-oss (2880) has none.
SMALL, ODD, QWEN3_30B = (16, 1024, 512, 4), (8, 720, 336, 2), (128, 2048, 768, 8)
RAGGED = (8, 1088, 320, 2)  # half a block of columns is left in both GEMMs
REAL = {
    "qwen3-30b": QWEN3_30B,
    "qwen3-235b": (128, 4096, 1536, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}

# Both sides quantize the hidden states to the same bits (tests/kernels). From there they differ by
# sums: tensor cores add FP8 products with about 14 bits, a relative error d of about 1e-3 in front
# of the middle quantization. It flips a code with probability d / ulp (E4M3: ulp about 2**-3.5),
# and each flip costs an ulp: sqrt(d * ulp) = 1 % of error, calc_diff = error**2 / 2 = 5e-5. Few
# values flip where tokens are few, so it scatters; 5e-6 to 2e-4 were measured.
CALC_DIFF = 1e-3
# Of the largest value: six of the errors above, where output elements are normal.
OUTLIER = 0.06


def gpu(test):
    test = pytest.mark.skipif(not HERE, reason="needs a CUDA device of SM90")(test)
    return pytest.mark.gpu(test)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "nvfp4", "activations": "none"}, "runs fp8_block alone"),
        ({"activations": "none"}, "activations in fp8_group128 alone"),
        ({"hidden": 264}, "needs H to be a multiple of 16"),
        ({"intermediate": 100}, "needs I to be a multiple of 16"),
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


@pytest.fixture(scope="module")
def weights():
    """weights(shape): experts on the device; the same arguments give the same."""
    made = {}

    def make(shape, act_fn=SILU, bias=False):
        if (shape, act_fn, bias) not in made:
            E, H, I, _ = shape
            g = torch.Generator("cuda").manual_seed(0)
            parts = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
            if not act_fn.gated:
                del parts["gate"]
            projections = {
                name: quantize(
                    torch.randn(size, generator=g, device="cuda") * size[2] ** -0.5,
                    "fp8_block",
                    scale="float32",
                )
                for name, size in parts.items()
            }
            biases = {
                f"{name}_bias": torch.randn(size[:2], generator=g, device="cuda") / 2
                for name, size in parts.items()
                if bias
            }
            made[shape, act_fn, bias] = ExpertWeights(
                **{"gate": None, **projections, **biases}, act_fn=act_fn
            )
        return made[shape, act_fn, bias]

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
@pytest.mark.parametrize("shape", [SMALL, ODD, QWEN3_30B])
def test_it_computes_what_the_reference_does(weights, inputs, shape, M):
    check(weights(shape), inputs(shape, M))


@gpu
@pytest.mark.parametrize("kind", ["skewed", "holes", "one expert", "nowhere"])
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 5), (ODD, 200), (QWEN3_30B, 300)])
def test_it_does_for_every_kind_of_routing(weights, inputs, shape, M, kind):
    call = inputs(shape, M, kind)
    got = check(weights(shape), call)
    assert not got[(call[2] < 0).all(1)].any()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("router", [torch.bfloat16, torch.float16, torch.float32])
def test_it_takes_every_dtype(weights, inputs, dtype, router):
    for M in (5, 20):  # up to 32 slots, the first GEMM reads the ids too
        hidden, topk_weights, ids = inputs(SMALL, M, dtype=dtype)
        check(weights(SMALL), (hidden, topk_weights.to(router), ids.long()))


@gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_takes_the_ids_of_other_ranks(weights, inputs, dtype):
    hidden, topk_weights, ids = inputs((64, *SMALL[1:]), 50)
    here = torch.full((64,), -1, dtype=dtype, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").to(dtype)
    check(weights(SMALL), (hidden, topk_weights, ids), expert_map=here)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_weights_the_input_where_asked(weights, inputs, dtype):
    hidden, topk_weights, ids = inputs((16, 1024, 512, 1), 30, dtype=dtype)
    topk_weights = topk_weights * torch.rand_like(topk_weights)
    check(weights(SMALL), (hidden, topk_weights, ids), apply_router_weight_on_input=True)


@gpu
def test_it_takes_strided_inputs(weights, inputs):
    hidden, topk_weights, ids = inputs(SMALL, 40)
    module = FusedExperts(weights(SMALL))
    strided = (t.repeat_interleave(2, 1)[:, ::2] for t in (hidden, topk_weights, ids))
    assert torch.equal(module(*strided), module(hidden, topk_weights, ids))


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
        identity = torch.arange(16, device="cuda")
        again = module(
            hidden, topk_weights, torch.where(absent, far, ids.long()), expert_map=identity
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)
    assert torch.equal(again, want)


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
    ActFn(name="gelu_tanh"),
    ActFn(name="relu2"),
    ActFn(name="silu", limit=0.7),
    SWIGLUOAI,
    ActFn(name="swigluoai", alpha=1.702, limit=0.7),
    ActFn(name="swigluoai", alpha=0.75, beta=-0.25),
    ActFn(name="swiglustep", limit=0.7),
    SITU,
    ActFn(name="situ", beta=0.5),
    ActFn(name="silu", gated=False),
    ActFn(name="gelu", gated=False, limit=0.7),
    ActFn(name="gelu_tanh", gated=False),
    RELU2,
]


@gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_it_computes_every_activation_function(weights, inputs, act_fn, bias):
    # 640 columns without a gate are two units and a half; tiles of 8, 32 and 128 rows.
    halves = (16, 1024, 640, 4)
    for shape, M in [(halves, 6), (ODD, 60), (halves, 700), (RAGGED, 9), (RAGGED, 700)]:
        check(weights(shape, act_fn, bias), inputs(shape, M))


@gpu
@pytest.mark.parametrize("M", [1, 40, 500])
def test_biases_count_for_silu_too(weights, inputs, M):
    check(weights(ODD, bias=True), inputs(ODD, M, "skewed"))


@gpu
@pytest.mark.parametrize("byte", [0x7F, 0xFF], ids=["huge", "nan"])
@pytest.mark.parametrize(
    "choice",
    [
        {"rows": 8},
        {"rows": 16},
        {"rows": 32},
        {"rows": 64},
        {"rows": 64, "gather": True},
        {"rows": 128},
        {"rows": 128, "pair": True},
        {"rows": 128, "gather": True},
        {"rows": 128, "pair": True, "gather": True},
    ],
    ids=lambda choice: "-".join(map(str, choice.values())),
)
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_no_buffer_is_read_before_it_is_written(weights, inputs, shape, choice, byte):
    from moequant.kernels.fp8_block.sm90_fp8_fused import Fp8BlockPlan, workspace_bytes
    from moequant.kernels.fp8_block.tuning import Tiling

    packed = pack_experts(weights(shape), backend=NAME).kernel_weights
    splits = ((1, 2), (2, 4)) if choice["rows"] <= 32 else ((1, 1),)
    for M, split in (*splits, (50, 1), (600, 1), (2000, 1)):
        hidden, topk_weights, ids = inputs(shape, M, "holes")
        want = FusedExperts(weights(shape), backend="torch_reference")(hidden, topk_weights, ids)
        tiling = Tiling(**choice, split13=split, split2=split)
        size_bytes = workspace_bytes(packed, M, shape[3], tiling)
        workspace = torch.full((size_bytes,), byte, dtype=torch.uint8, device="cuda")
        plan = Fp8BlockPlan(packed, M, shape[3], workspace=workspace, tiling=tiling)
        out = torch.full_like(hidden, torch.nan)
        plan(hidden, topk_weights, ids, out)
        assert bool(out.isfinite().all())
        assert not want.any() or calc_diff(out, want) <= CALC_DIFF


@gpu
@pytest.mark.parametrize("shape", [(16, 1024, 512, 1), (8, 1088, 320, 1)])
@pytest.mark.parametrize(
    "choice",
    [{"rows": 128}, {"rows": 128, "pair": True}, {"rows": 64}, {"rows": 64, "gather": True}],
    ids=lambda choice: "-".join(map(str, choice.values())),
)
def test_every_number_of_rows_behind_whole_tiles_counts(weights, inputs, shape, choice):
    from moequant.kernels.fp8_block.sm90_fp8_fused import Fp8BlockPlan, workspace_bytes
    from moequant.kernels.fp8_block.tuning import Tiling

    packed = pack_experts(weights(shape), backend=NAME).kernel_weights
    tiling = Tiling(**choice)
    for counts in ([127, 128, 129, 135, 136, 137, 143, 144], [145, 0, 256, 257, 264, 272, 273, 1]):
        ids = torch.arange(8).repeat_interleave(torch.tensor(counts))
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
        hidden, topk_weights, _ = inputs(shape, len(ids))
        call = hidden, topk_weights, ids[:, None].int().cuda()
        size_bytes = workspace_bytes(packed, len(ids), 1, tiling)
        workspace = torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        out = torch.full_like(hidden, torch.nan)
        Fp8BlockPlan(packed, len(ids), 1, workspace=workspace, tiling=tiling)(*call, out)
        want = FusedExperts(weights(shape), backend="torch_reference")(*call)
        for expert in range(8):
            rows = ids == expert
            assert not counts[expert] or calc_diff(out[rows], want[rows]) <= CALC_DIFF, expert


def experts_of(weights, ids):
    """The layer with only the experts that `ids` names, and `ids` among these."""
    used, among = ids.clamp(min=0).unique(return_inverse=True)
    parts = {
        name: QuantizedWeight(
            format=q.format,
            qdata=q.qdata[used],
            scale=q.scale[used],
            global_scale=None,
            shape=torch.Size((len(used), *q.shape[1:])),
        )
        for name, q in weights.projections().items()
    }
    among = among.reshape(ids.shape).int().masked_fill(ids < 0, -1)
    return ExpertWeights(**parts), among


@gpu
@pytest.mark.parametrize("name", REAL)
def test_it_does_on_the_shapes_of_real_models(inputs, name):
    """Each M and kind of routing; of many tokens, a few are compared.

    Random codes and scales stand in for quantized weights, which take longer to make. Activations
    are those of the whole call: a token's output depends on no other token.
    """
    shape = REAL[name]
    layer = random_experts(shape)
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


def random_experts(shape):
    E, H, I, _ = shape
    g = torch.Generator("cuda").manual_seed(0)

    def projection(rows, cols):
        codes = torch.empty(E, rows, cols, dtype=torch.uint8, device="cuda")
        codes.random_(0, 256, generator=g)
        codes.view(torch.uint8)[(codes & 0x7F) == 0x7F] = 0  # no NaN
        scale_shape = (E, -(-rows // 128), -(-cols // 128))
        scale = torch.rand(scale_shape, generator=g, device="cuda") + 0.5
        return QuantizedWeight(
            format="fp8_block",
            qdata=codes.view(torch.float8_e4m3fn),
            scale=scale * 0.006 * cols**-0.5,
            global_scale=None,
            shape=torch.Size((E, rows, cols)),
        )

    return ExpertWeights(gate=projection(I, H), up=projection(I, H), down=projection(H, I))


@gpu
def test_a_workspace_of_the_caller_is_reused_and_its_size_is_known(weights, inputs):
    module = FusedExperts(weights(SMALL), backend=NAME)
    calls = [inputs(SMALL, M) for M in (1, 40, 600)]
    sizes = [module.workspace_bytes(call[1].shape[0], SMALL[3]) for call in calls]
    workspace = torch.empty(max(sizes), dtype=torch.uint8, device="cuda")
    guard = torch.full((4096,), 7, dtype=torch.uint8, device="cuda")
    want = [module(*call) for call in calls]
    for _ in range(2):
        for call, size_bytes, expected in zip(calls, sizes, want, strict=True):
            out = torch.full_like(expected, torch.nan)
            got = module(*call, workspace=workspace[:size_bytes], out=out)
            assert got is out
            assert torch.equal(out, expected)
            with pytest.raises(UnsupportedError, match=f"at least {size_bytes} bytes"):
                module(*call, workspace=workspace[: size_bytes - 1])
    assert bool((guard == 7).all())


@gpu
def test_the_module_holds_gate_and_up_once(weights, inputs):
    layer = copy.deepcopy(weights(QWEN3_30B))
    module = FusedExperts(layer)
    del layer
    call = inputs(QWEN3_30B, 5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first = module(*call)
    assert torch.cuda.memory_allocated() - before < 64 << 20  # 400 MB are gate and up
    state = module.state_dict()
    gate = state["w13_qdata"][:, : QWEN3_30B[2]]
    assert torch.equal(
        gate.contiguous().view(torch.uint8), weights(QWEN3_30B).gate.qdata.view(torch.uint8)
    )
    module.load_state_dict({name: t.clone() for name, t in state.items()})
    assert torch.equal(module(*call), first)


@gpu
def test_more_slots_than_the_sort_takes_run_in_parts(weights, inputs):
    from moequant.kernels.routing import MAX_SLOTS

    call = inputs(SMALL, MAX_SLOTS // SMALL[3] + 40)
    check(weights(SMALL), call)


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
def test_a_first_call_within_a_capture_is_refused(weights, inputs, monkeypatch):
    module = FusedExperts(weights(SMALL))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="call the experts once before the capture"):
        module(*inputs(SMALL, 4))


@gpu
def test_weights_that_are_loaded_later_count(weights, inputs):
    call = inputs(SMALL, 16)
    module = FusedExperts(copy.deepcopy(weights(SMALL)))
    first = module(*call)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    state["w13_scale"][:, SMALL[2] // 128 :] *= 2
    module.load_state_dict(state)
    assert torch.equal(module(*call), 2 * first)
    state["w13_scale"][:, SMALL[2] // 128 :] /= 2
    module.load_state_dict(state, assign=True)
    assert torch.equal(module(*call), first)


@gpu
def test_a_module_moves_to_the_device_and_back(weights, inputs):
    call = inputs(SMALL, 16)
    module = FusedExperts(weights(SMALL))
    want = module(*call)
    back = module.cpu()
    on_cpu = back(*(t.cpu() for t in call))
    assert calc_diff(on_cpu.cuda(), want) <= CALC_DIFF
    assert torch.equal(back.cuda()(*call), want)


@gpu
@pytest.mark.parametrize("M", [1, 3, 8, 32, 128, 512, 3000])
@pytest.mark.parametrize("shape", [SMALL, ODD, QWEN3_30B])
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, inputs, shape, M
):
    hidden, topk_weights, ids = inputs(shape, M, "holes")
    module = FusedExperts(weights(shape), backend=NAME)
    x = quantize_activations(hidden, "fp8_group128")
    want = module(hidden, topk_weights, ids)
    shared_workspace(hidden.device, 0).fill_(0x7F)
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, want)


@gpu
@pytest.mark.parametrize(
    "choice",
    [{"rows": 8}, {"rows": 128}, {"rows": 64, "gather": True}, {"rows": 128, "gather": True}],
    ids=lambda choice: "-".join(map(str, choice.values())),
)
def test_they_do_with_every_way_to_prepare(weights, inputs, choice):
    from moequant.kernels.fp8_block.sm90_fp8_fused import Fp8BlockPlan, workspace_bytes
    from moequant.kernels.fp8_block.tuning import Tiling

    packed = pack_experts(weights(SMALL), backend=NAME).kernel_weights
    hidden, topk_weights, ids = inputs(SMALL, 6)
    x, tiling = quantize_activations(hidden, "fp8_group128"), Tiling(**choice)
    size = workspace_bytes(packed, 6, SMALL[3], tiling)
    outs = []
    for call in ((hidden, None), (x.qdata, x.scale)):
        memory = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
        plan = Fp8BlockPlan(packed, 6, SMALL[3], workspace=memory, tiling=tiling)
        outs.append(torch.empty_like(hidden))
        plan(call[0], topk_weights, ids, outs[-1], None, call[1])
    assert torch.equal(*outs)
