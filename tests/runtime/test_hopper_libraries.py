"""CUTLASS and DeepGEMM as backends for FP8 on Hopper, which run by name.

All but the reasons for no want SM90 and the package, nvidia-cutlass-dsl or deep_gemm.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from itertools import product

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import quantize
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts, select
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY, Workload, cutlass_fp8
from moequant.runtime.backends.stacked import STACKED
from moequant.runtime.batched import finalize_batched, prepare_batched
from moequant.runtime.call import run_experts
from moequant.runtime.functional import deep_gemm_moe_fp8
from moequant.runtime.routing import route
from moequant.runtime.workspace import shared_workspace

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
# and a sum of parts, which float32 adds, has the same relative error whatever K is (without
# promotion it would be 3e-3 for K = 2048). Rounding to bfloat16 adds 2**-9 / sqrt(3): d = 1.4e-3,
# an error of sqrt(2 * d * 2**-3.5) = 1.6 %, calc_diff 1.2e-4, and scatters as described there.
#
# DeepGEMM's middle is rounded to bfloat16 too, which flips as many codes as the tensor cores' sums
# do: ulp / 2**-9, so sqrt(2**-9 * 2**-3.5) = 1.3 % more, calc_diff 1e-4.
CALC_DIFF = 1e-3

ACT_FNS = [
    SWIGLUOAI,
    SITU,
    RELU2,
    ActFn(name="gelu"),
    ActFn(name="swiglustep", limit=0.7),
    ActFn(name="gelu_tanh", gated=False, limit=0.7),
]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A library: its backend, the format that it runs, and how it is tested.

    `others` names the schemes that it takes beside `scheme`, as its refusals do. `kind` is the
    routing of calls that a test does not choose, see `inputs`. `outlier` bounds the largest error
    of an element, as a share of the largest element; None where it is not checked.
    """

    name: str
    format: str
    scheme: str
    others: str = ""
    options: dict[str, str] = field(default_factory=dict)
    kind: str = "uniform"
    outlier: float | None = None

    @property
    def batched(self):
        return f"{self.name}_batched"

    @property
    def workload(self):
        return Workload(
            format=self.format,
            activations=self.scheme,
            experts=8,
            hidden=256,
            intermediate=128,
            device=torch.device("cuda", 0),
        )

    @property
    def marks(self):
        why_not = REGISTRY[self.name].supports(self.workload)
        reason = f"{self.name} {why_not}"
        return [pytest.mark.gpu, pytest.mark.skipif(why_not is not None, reason=reason)]

    def module(self, layer):
        return FusedExperts(layer, backend=self.name)

    def check(self, got, layer, call, **options):
        """Compare a result with the reference's."""
        want = FusedExperts(layer, backend="torch_reference")(*call, **options)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert bool(got.isfinite().all())
        if not want.any():
            assert not got.any()
            return
        assert calc_diff(got, want) <= CALC_DIFF
        if self.outlier is not None:
            most = self.outlier * want.float().abs().max()
            assert (got.float() - want.float()).abs().max() <= most


CUTLASS = Engine(
    name="cutlass_fp8",
    format="fp8_channel",
    scheme="fp8_token",
    others=" or fp8_tensor",
    options={"scale": "float32"},
    outlier=0.06,
)
DEEPGEMM = Engine(name="deepgemm", format="fp8_block", scheme="fp8_group128", kind="holes")
ENGINES = (CUTLASS, DEEPGEMM)

every_backend = pytest.mark.parametrize(
    ("engine", "name"),
    [(e, name) for e in ENGINES for name in (e.name, e.batched)],
    ids=lambda value: value if isinstance(value, str) else "",
)


def on_gpu(names, *, cutlass, deepgemm):
    """Run a test with each engine and its cases, tuples of what `names` says, on a GPU."""
    return pytest.mark.parametrize(
        ("engine", *names.split()),
        [
            pytest.param(
                engine, *case, marks=engine.marks, id="-".join(map(str, (engine.name, *case)))
            )
            for engine, cases in ((CUTLASS, cutlass), (DEEPGEMM, deepgemm))
            for case in cases
        ],
    )


def of_one(engine):
    """Run a test on a GPU that has what this engine needs."""

    def mark(test):
        for one in engine.marks:
            test = one(test)
        return test

    return mark


@pytest.fixture(scope="module")
def weights():
    """weights(engine, shape, act_fn, biases): experts on the GPU; equal arguments give the same."""
    made = {}

    def make(engine, *arguments):
        key = (engine.name, *arguments)
        if key not in made:
            made[key] = weights_of(engine, *arguments)
        return made[key]

    return make


def weights_of(engine, shape, act_fn=SILU, biases=False):
    E, H, I, _ = shape
    g = torch.Generator("cuda").manual_seed(0)
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del sizes["gate"]
    parts = {"gate": None}
    for name, size in sizes.items():
        w = torch.randn(size, generator=g, device="cuda") * size[2] ** -0.5
        parts[name] = quantize(w, engine.format, **engine.options)
        if biases:
            parts[f"{name}_bias"] = torch.randn(size[:2], generator=g, device="cuda")
    return ExpertWeights(**parts, act_fn=act_fn)


@every_backend
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "nvfp4", "activations": "none"}, "runs only {0.format}"),
        ({"activations": "fp8_static"}, "takes only activations in {0.scheme}{0.others}"),
        ({"activations": "none"}, "takes only activations in {0.scheme}{0.others}"),
        ({"hidden": 264}, "needs H to be a multiple of 16, not 264"),
        ({"intermediate": 100}, "needs I to be a multiple of 16, not 100"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_what_it_cannot_run_it_refuses_with_the_reason(engine, name, change, reason):
    asked, said = replace(engine.workload, **change), reason.format(engine)
    assert REGISTRY[name].supports(asked) == said
    with pytest.raises(UnsupportedError, match=said):
        select(asked, name)


@every_backend
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act_fn", ACT_FNS, ids=str)
def test_no_function_or_bias_is_a_reason_for_no(engine, name, act_fn, bias):
    asked = replace(engine.workload, act_fn=act_fn, bias=bias)
    assert REGISTRY[name].supports(asked) == REGISTRY[name].supports(engine.workload)


@every_backend
def test_it_is_never_chosen_unasked(engine, name):
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


def test_the_call_without_a_module_says_why_it_cannot_run_here():
    w13, w2 = (torch.zeros(2, 256, 128).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
    call = (torch.zeros(3, 128), w13, w2.mT, *scales, torch.ones(3, 1), torch.zeros(3, 1))
    reason = (
        r"^w13 is \[2, 256, 128\] and w2 \[2, 128, 256\], but with silu they must be "
        r"\[E, 2 \* Ip, H\] and \[E, H, I\], Ip the next multiple of 128 from I on; "
    )
    with pytest.raises(UnsupportedError, match=reason):
        deep_gemm_moe_fp8(*call)
    with pytest.raises(UnsupportedError, match="deep_gemm_moe_fp8 needs a CUDA device"):
        deep_gemm_moe_fp8(*call[:2], w2[:, :128].mT[:, :, :128], *call[3:])


@on_gpu(
    "shape M kind",
    cutlass=[
        *product([SMALL, ODD, QWEN3_30B], [0, 1, 3, 8, 32, 128, 512, 2048], ["uniform"]),
        *(
            (*size, kind)
            for size in ((SMALL, 5), (ODD, 200), (SMALL, 700))
            for kind in ("skewed", "holes", "one expert", "nowhere")
        ),
    ],
    deepgemm=product([SMALL, ODD], [0, 1, 40, 500], ["holes"]),
)
def test_it_computes_what_the_reference_does(weights, inputs, engine, shape, M, kind):
    layer, call = weights(engine, shape), inputs(shape, M, kind)
    engine.check(engine.module(layer)(*call), layer, call)


@of_one(CUTLASS)
@pytest.mark.parametrize("kind", ["uniform", "holes", "nowhere"])
@pytest.mark.parametrize("M", [0, 1, 40, 700])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["small", "odd"])
def test_one_scale_of_all_tokens_computes_what_the_reference_does(weights, inputs, shape, M, kind):
    layer, call = weights(CUTLASS, shape, SWIGLUOAI, True), inputs(shape, M, kind)
    reference, *modules = (
        FusedExperts(layer, backend=name, activations="fp8_tensor")
        for name in ("torch_reference", CUTLASS.name, CUTLASS.batched)
    )
    want = reference(*call)
    x = quantize_activations(call[0], "fp8_tensor")
    for module in modules:
        got = module(*call)
        assert bool(got.isfinite().all())
        assert calc_diff(got, want) <= CALC_DIFF if want.any() else not got.any()
        shared_workspace(got.device, 0).fill_(0x7F)
        assert torch.equal(module(*call), got)
        assert torch.equal(module(x.qdata, *call[1:], hidden_scale=x.scale), got)


@of_one(CUTLASS)
def test_one_scale_is_found_within_a_graph(weights, inputs):
    layer = weights(CUTLASS, SMALL)
    module = FusedExperts(layer, backend=CUTLASS.name, activations="fp8_tensor")
    static = inputs(SMALL, 64)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    hidden, *routing = inputs(SMALL, 64, "skewed")
    for to, value in zip(static, (hidden * 0.01, *routing), strict=True):
        to.copy_(value)
    graph.replay()
    assert torch.equal(out, module(hidden * 0.01, *routing))


@on_gpu(
    "act_fn biases",
    cutlass=product(ACT_FNS, [False, True]),
    deepgemm=product(ACT_FNS, [False, True]),
)
def test_it_computes_every_function_with_and_without_biases(
    weights, inputs, engine, act_fn, biases
):
    for shape, M in ((SMALL, 60), (ODD, 300)):
        layer, call = weights(engine, shape, act_fn, biases), inputs(shape, M, engine.kind)
        engine.check(engine.module(layer)(*call), layer, call)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@on_gpu(
    "dtype act_fn router_dtype ids_dtype",
    cutlass=[(dtype, SILU, dtype, torch.int64) for dtype in DTYPES],
    deepgemm=[(dtype, SWIGLUOAI, torch.float32, torch.int32) for dtype in DTYPES],
)
def test_it_takes_every_dtype(weights, inputs, engine, dtype, act_fn, router_dtype, ids_dtype):
    hidden, topk_weights, ids = inputs(SMALL, 30, engine.kind, dtype)
    layer, call = (
        weights(engine, SMALL, act_fn),
        (hidden, topk_weights.to(router_dtype), ids.to(ids_dtype)),
    )
    engine.check(engine.module(layer)(*call), layer, call)


@on_gpu("", cutlass=[()], deepgemm=[()])
def test_it_takes_the_ids_of_other_ranks_and_weights_the_input(weights, inputs, engine):
    layer, call = weights(engine, SMALL), inputs((64, *SMALL[1:3], 1), 50, engine.kind)
    here = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    here[20:36] = torch.arange(15, -1, -1, device="cuda").int()
    for on_input in (False, True):
        options = {"expert_map": here, "apply_router_weight_on_input": on_input}
        engine.check(engine.module(layer)(*call, **options), layer, call, **options)


@on_gpu("act_fn biases", cutlass=[(SILU, False)], deepgemm=[(SWIGLUOAI, True)])
def test_a_workspace_of_the_caller_is_enough_and_not_read_before_it_is_written(
    weights, inputs, engine, act_fn, biases
):
    layer = weights(engine, SMALL, act_fn, biases)
    packed = pack_experts(layer, backend=engine.name)
    for M in (1, 300):
        call = inputs(SMALL, M, engine.kind)
        size = packed.workspace_bytes(M, SMALL[3])
        # Bytes of 0x7F are NaN in E4M3, huge numbers in float32, and absurd indices.
        for byte in (0x7F, 0xFF):
            memory = torch.full((size,), byte, dtype=torch.uint8, device="cuda")
            engine.check(run_experts(packed, *call, workspace=memory), layer, call)


@on_gpu("", cutlass=[()], deepgemm=[()])
def test_a_captured_call_is_replayed_on_new_inputs_to_the_same_bits(weights, inputs, engine):
    module, static = engine.module(weights(engine, SMALL)), inputs(SMALL, 64, engine.kind)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    calls = [inputs(SMALL, 64, kind) for kind in ("skewed", "holes", "uniform")]
    calls.append(tuple(t[:64] for t in inputs(SMALL, 65, engine.kind)))  # other hidden states
    for call in calls:
        for to, value in zip(static, call, strict=True):
            to.copy_(value)
        graph.replay()
        for _ in range(2):
            assert torch.equal(out, module(*call))


@on_gpu(
    "shape M",
    cutlass=[(ODD, 3), (ODD, 60), (ODD, 2000)],
    deepgemm=[(SMALL, 60), (ODD, 60)],
)
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, inputs, engine, shape, M
):
    hidden, topk_weights, ids = inputs(shape, M, "holes")
    module = engine.module(weights(engine, shape))
    x = quantize_activations(hidden, engine.scheme)
    got = module(x.qdata, topk_weights, ids, hidden_scale=x.scale)
    assert torch.equal(got, module(hidden, topk_weights, ids))


@on_gpu(
    "shape M",
    cutlass=product([SMALL, ODD], [1, 100, 300]),
    deepgemm=product([SMALL, ODD], [1, 100]),
)
def test_batches_compute_what_the_reference_does(weights, inputs, engine, shape, M):
    layer, (hidden, topk_weights, ids) = weights(engine, shape), inputs(shape, M, engine.kind)
    routing = route(topk_weights, ids, experts=shape[0])
    tokens, places = prepare_batched(
        hidden, routing, experts=shape[0], capacity=M, scheme=engine.scheme
    )
    tokens.scale[torch.arange(M, device="cuda")[None, :] >= tokens.counts[:, None]] = torch.nan
    rows = pack_experts(layer, backend=engine.batched).run_batches(tokens)
    got = finalize_batched(rows, routing, places).to(hidden.dtype)
    engine.check(got, layer, (hidden, topk_weights, ids))


@on_gpu("act_fn", cutlass=product(ACT_FNS), deepgemm=product(ACT_FNS))
def test_batches_compute_every_function_with_biases(weights, inputs, engine, act_fn):
    layer, call = weights(engine, ODD, act_fn, True), inputs(ODD, 40, engine.kind)
    engine.check(FusedExperts(layer, backend=engine.batched)(*call), layer, call)


@of_one(CUTLASS)
@pytest.mark.parametrize("tile_rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=str)
def test_every_variant_reads_no_buffer_before_it_is_written(weights, inputs, shape, tile_rows):
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.cutlass.sm90_fp8_channel_fused import CutlassPlan
    from moequant.kernels.cutlass.variant import GemmVariant

    layer = weights(CUTLASS, shape)
    tensors = pack_experts(layer, backend="cutlass_fp8").tensors
    variant = GemmVariant(tile_rows=tile_rows)
    for M in (1, 2, 50, 600):
        call = inputs(shape, M, "holes")
        plan = (tensors, SILU, M, shape[3])
        size = WorkspaceArena()
        CutlassPlan(*plan, size, variant=variant)
        # As of the caller's workspace.
        for byte in (0x7F, 0xFF):
            memory = torch.full((size.size_bytes,), byte, dtype=torch.uint8, device="cuda")
            out = torch.full_like(call[0], torch.nan)
            CutlassPlan(*plan, WorkspaceArena(memory), variant=variant)(*call, out)
            CUTLASS.check(out, layer, call)


@of_one(CUTLASS)
@pytest.mark.parametrize(("shape", "M"), [(SMALL, 1), (ODD, 33), (QWEN3_30B, 512)], ids=str)
def test_runs_of_one_call_are_bitwise_equal(weights, inputs, shape, M):
    module, call = CUTLASS.module(weights(CUTLASS, shape)), inputs(shape, M, "skewed")
    first = module(*call)
    for _ in range(20):
        assert torch.equal(module(*call), first)


@of_one(CUTLASS)
def test_a_second_call_encodes_no_tensor_map(weights, inputs, monkeypatch):
    from moequant.kernels.cutlass import grouped_gemm

    layer = weights(CUTLASS, SMALL)
    module = CUTLASS.module(layer)
    module(*inputs(SMALL, 64))
    monkeypatch.delattr(grouped_gemm, "tensor_map")
    for kind in ("skewed", "holes"):
        call = inputs(SMALL, 64, kind)
        CUTLASS.check(module(*call), layer, call)


@of_one(CUTLASS)
def test_calls_from_threads_on_streams_of_their_own_do_not_meet(weights, inputs):
    module = CUTLASS.module(weights(CUTLASS, SMALL))
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


@of_one(DEEPGEMM)
@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
def test_no_weight_is_there_twice(weights, inputs, act_fn):
    module = DEEPGEMM.module(weights(DEEPGEMM, ODD, act_fn))
    module(*inputs(ODD, 4, DEEPGEMM.kind))
    w13 = module.packed().tensors["w13_qdata"]
    assert module.weights.up.qdata.untyped_storage().data_ptr() == w13.untyped_storage().data_ptr()


@of_one(DEEPGEMM)
def test_the_call_without_a_module_gives_the_same_bits(weights, inputs):
    layer, (hidden, topk_weights, ids) = weights(DEEPGEMM, ODD), inputs(ODD, 40, DEEPGEMM.kind)
    want = DEEPGEMM.module(layer)(hidden, topk_weights, ids)
    w = STACKED.pack(layer)
    parts = tuple(w[name] for name in ("w13_qdata", "w2_qdata", "w13_scale", "w2_scale"))
    assert torch.equal(deep_gemm_moe_fp8(hidden, *parts, topk_weights, ids), want)
    with pytest.raises(CheckpointError, match="w13_scale is"):
        deep_gemm_moe_fp8(hidden, *parts[:2], w["w2_scale"], w["w2_scale"], topk_weights, ids)
