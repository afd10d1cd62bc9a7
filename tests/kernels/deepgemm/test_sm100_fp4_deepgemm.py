"""Our part of MXFP4 by MXFP8 through DeepGEMM, around a model of the package.

The model, in conftest.py, refuses calls that DeepGEMM would refuse, and reads as its kernels do.
Our kernels run in the interpreter, or on any CUDA device.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.errors import UnsupportedError
from moequant.formats import dequantize, quantize
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.deepgemm.sm100_fp4_deepgemm import batched_experts
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY
from moequant.runtime.batched import finalize_batched, prepare_batched
from moequant.runtime.call import run_experts
from moequant.runtime.packing import workload_of
from moequant.runtime.routing import route

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
E, H, I, M, T = 4, 256, 128, 9, 2
FUNCTIONS = [SILU, SWIGLUOAI, SITU, RELU2, ActFn(name="gelu", gated=False, limit=0.5)]

# Gate and up are rounded to bfloat16, which moves a value between the GEMMs by 2**-9 of it on
# average. A step of E4M3 is 2**-3.5 of a value, so that flips 2**-9 / 2**-3.5 of the codes, each by
# a step: an error of sqrt(2**-9 * 2**-3.5) = 1.3 % of the norm. calc_diff is half its square, 9e-5;
# an expert's result in bfloat16 adds 1e-6. In layers so small, a few large values count for most:
# five times that. test_a_layer_is_its_experts_weighted rounds as the plan does, and is close.
CALC_DIFF = 4.5e-4


def weights_of(act_fn=SILU, biases=False):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del shapes["gate"]
    parts = {"gate": None}
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=g) * shape[2] ** -0.5
        # Scales of rows and groups that differ: one in the place of another shows.
        octaves = torch.randint(-3, 4, (*shape[:2], shape[2] // 32), generator=g)
        w *= 2.0 ** octaves.repeat_interleave(32, 2)
        parts[name] = quantize(w.to(DEVICE), "mxfp4")
        if biases:
            parts[f"{name}_bias"] = torch.randn(shape[:2], generator=g).to(DEVICE)
    return ExpertWeights(**parts, act_fn=act_fn)


def call_of(dtype=torch.float32, tokens=M):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, H, generator=g).to(dtype)
    topk_weights, ids = torch.rand(tokens, E, generator=g).topk(T)
    ids[0, 0] = -1
    return hidden.to(DEVICE), topk_weights.to(DEVICE), ids.to(DEVICE)


def pack(weights, name="deepgemm_fp4"):
    """As the backend packs them, which runs on SM100 alone."""
    backend = REGISTRY[name]
    return backend.load(backend.layout.pack(weights), workload_of(weights, "mxfp8"))


def run_batches(weights, call, capacity=M):
    hidden, topk_weights, ids = call
    routing = route(topk_weights, ids, experts=E)
    tokens, places = prepare_batched(hidden, routing, experts=E, capacity=capacity, scheme="none")
    rows = pack(weights, "deepgemm_fp4_batched").run_batches(tokens)
    assert rows.shape == tokens.qdata.shape
    return finalize_batched(rows, routing, places).to(hidden.dtype)


def check(got, weights, call, **options):
    experts = FusedExperts(weights, backend="torch_reference", activations="mxfp8")
    want = experts(*call, **options)
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    assert calc_diff(got, want) <= CALC_DIFF


def test_weights_are_read_as_the_numbers_that_they_are(sm100_library):
    """To the bit, in both GEMMs."""
    model, weights = sm100_library(), weights_of()
    run_experts(pack(weights), *call_of())
    (_, _, w13, _, _), (_, _, w2, _, _) = model.calls
    plain = {name: dequantize(q).double() for name, q in weights.projections().items()}
    assert torch.equal(numbers(*w13), torch.cat([plain["gate"], plain["up"]], 1))
    assert torch.equal(numbers(*w2), plain["down"])


def numbers(codes, words):
    """Packed FP4 by packed scales, number by number, as DeepGEMM's documents describe them."""
    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor(e2m1 + [-x for x in e2m1], dtype=torch.float64, device=DEVICE)
    byte = codes.int() & 0xFF
    out = torch.stack([values[byte & 15], values[byte >> 4]], -1).flatten(-2)
    for group in range(out.shape[-1] // 32):
        exponent = ((words[..., group // 4] >> 8 * (group % 4)) & 0xFF).long() - 127
        # By its bits: pow on a GPU is good to two ulp.
        power = ((exponent + 1023) << 52).view(torch.float64)
        out[..., 32 * group : 32 * group + 32] *= power[..., None]
    return out


@pytest.mark.parametrize(
    ("dtype", "alignment"),
    [
        (torch.bfloat16, 32),
        (torch.float16, 128),
        (torch.float32, 224),
        *(
            pytest.param(dtype, alignment, marks=pytest.mark.full)
            for dtype, alignment in (
                (torch.bfloat16, 128), (torch.bfloat16, 224), (torch.float16, 32),
                (torch.float16, 224), (torch.float32, 32), (torch.float32, 128),
            )
        ),
    ],
)  # fmt: skip
def test_rows_are_those_of_the_quantizer_where_their_expert_begins(sm100_library, dtype, alignment):
    model, (hidden, topk_weights, ids) = sm100_library(alignment), call_of(dtype)
    packed = pack(weights_of())
    run_experts(packed, hidden, topk_weights, ids)
    kind, (codes, words), _, _, ends = model.calls[0]
    assert kind == "contiguous"
    x, start = quantize_activations(hidden, "mxfp8"), 0
    for e, end in enumerate(ends.tolist()):
        tokens = (ids == e).any(1).nonzero()[:, 0]
        assert end - start == len(tokens)
        want = x.take(tokens)
        assert torch.equal(codes[start:end].view(torch.uint8), want.qdata.view(torch.uint8))
        scale = words[start:end].contiguous().view(torch.uint8)
        assert torch.equal(scale, want.scale.view(torch.uint8))
        start = -(-end // alignment) * alignment


def by_pair(weights, hidden, topk_weights, ids):
    """The layer in float64, pair by pair, rounded where the plan rounds: [M, H] float32."""
    plain = {name: dequantize(q).double() for name, q in weights.projections().items()}
    biases, out = weights.biases(), torch.zeros(hidden.shape, device=DEVICE)

    def linear(x, names, e):
        x = quantize_activations(x, "mxfp8").dequantize().double()
        y = torch.cat([x @ plain[name][e].T for name in names], 1).bfloat16().float()
        return [
            part + biases.get(f"{name}_bias", torch.zeros(E, 1, device=DEVICE))[e]
            for name, part in zip(names, y.chunk(len(names), 1), strict=True)
        ]

    for m, t in (ids >= 0).nonzero().tolist():
        e = int(ids[m, t])
        halves = linear(hidden[m : m + 1], [n for n in plain if n != "down"], e)
        act = weights.act_fn(*(halves if len(halves) == 2 else [None, *halves]))
        out[m] += topk_weights[m, t] * linear(act, ["down"], e)[0][0]
    return out


@pytest.mark.parametrize(("act_fn", "biases"), [(SILU, False), (SWIGLUOAI, True), (RELU2, False)])
def test_a_layer_is_its_experts_weighted(sm100_library, act_fn, biases):
    """The same values are rounded, but for exp, which is good to a few ulp of float32, and the
    order of sums: no code is expected to differ, and a result in bfloat16 rarely, by 2**-8. The two
    of a token are added in float32, which a GPU may round once less: 2**-23 of the largest.
    """
    sm100_library()
    weights, call = weights_of(act_fn, biases), call_of()
    want = by_pair(weights, *call)
    largest = want.abs().amax(1, keepdim=True)
    for got in (run_experts(pack(weights), *call), run_batches(weights, call)):
        difference = (got - want).abs()
        assert (difference <= 2**-8 * largest).all()
        assert (difference <= 2**-23 * largest).float().mean() > 0.9


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", FUNCTIONS, ids=str)
def test_every_function_with_and_without_biases(sm100_library, act_fn, biases):
    sm100_library()
    weights, call = weights_of(act_fn, biases), call_of()
    check(run_experts(pack(weights), *call), weights, call)


@pytest.mark.parametrize("biases", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("act_fn", FUNCTIONS, ids=str)
def test_batches_too(sm100_library, act_fn, biases):
    model, weights, call = sm100_library(), weights_of(act_fn, biases), call_of()
    check(run_batches(weights, call), weights, call)
    assert [kind for kind, *_ in model.calls] == ["masked", "masked"]


@pytest.mark.parametrize(
    "alignment", [*(pytest.param(n, marks=pytest.mark.full) for n in (16, 32)), 224]
)
def test_rows_go_by_the_alignment_that_is_set(sm100_library, alignment):
    sm100_library(alignment)
    weights, call = weights_of(), call_of(tokens=40)
    check(run_experts(pack(weights), *call), weights, call)


@pytest.mark.parametrize(
    ("alignment", "capacity"),
    [*(pytest.param(n, 40, marks=pytest.mark.full) for n in (16, 32)), (32, 64)],
)
def test_batches_are_padded_to_whole_tiles(sm100_library, alignment, capacity):
    model = sm100_library(alignment)
    weights, call = weights_of(), call_of(tokens=40)
    check(run_batches(weights, call, capacity), weights, call)
    assert model.calls[0][3].shape[1] == -(-capacity // alignment) * alignment


def test_an_alignment_that_changed_since_is_refused(sm100_library):
    model, packed, call = sm100_library(), pack(weights_of()), call_of()
    want = run_experts(packed, *call)
    model.alignment = 64
    with pytest.raises(UnsupportedError, match=r"layout is 64, but was 128 when .* set it back"):
        run_experts(packed, *call)
    assert torch.isfinite(run_experts(pack(weights_of()), *call)).all()
    model.alignment = 128
    assert torch.equal(run_experts(packed, *call), want)


def test_an_expert_map_counts_and_biases_follow_it(sm100_library):
    sm100_library()
    weights, call = weights_of(SWIGLUOAI, biases=True), call_of()
    here = torch.tensor([2, -1, 0, 3], device=DEVICE)
    got = run_experts(pack(weights), *call, expert_map=here)
    check(got, weights, call, expert_map=here)


def test_the_workspace_is_as_large_as_was_said_and_may_hold_anything(sm100_library):
    sm100_library()
    weights, call = weights_of(SILU, biases=True), call_of()
    packed = pack(weights)
    size = packed.workspace_bytes(M, T)
    want = run_experts(packed, *call)
    for byte in (0x7F, 0xFF, 0x00):
        memory = torch.full((size + 64,), byte, dtype=torch.uint8, device=DEVICE)
        assert torch.equal(run_experts(packed, *call, workspace=memory[:size]), want)
        assert bool((memory[size:] == byte).all())


def test_the_plan_takes_nothing_but_the_arena(sm100_library):
    sm100_library()
    packed, arena = pack(weights_of()), WorkspaceArena()
    gemms = packed.plan(M, T, arena, torch.float32).gemms
    parts = (gemms.x.codes, gemms.x.scale, gemms.gate_up, gemms.act, gemms.act_codes.codes, gemms.y)
    assert {t.device.type for t in parts} == {"meta"}
    assert arena.size_bytes == packed.workspace_bytes(M, T)


def test_nothing_is_read_on_the_host(sm100_library, host_reads):
    model, weights, (hidden, topk_weights, ids) = sm100_library(32), weights_of(), call_of()
    counts = torch.tensor([3, 0, 9, 1], dtype=torch.int32, device=DEVICE)
    packed, rows = pack(weights), torch.randn(E, M, H, device=DEVICE)
    memory = torch.empty(packed.workspace_bytes(M, T), dtype=torch.uint8, device=DEVICE)
    # In place of the model, which reads; the other kernels are Triton's, which see addresses.
    for gemm in ("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_masked"):
        setattr(model, gemm, lambda a, b, d, *_, **__: model.calls.append(d.zero_()))
    with host_reads as reads:
        run_experts(packed, hidden, topk_weights, ids, workspace=memory)
        batched_experts(packed.tensors, SILU, rows, counts)
        assert not reads.found
        assert bool(counts[0])
        assert reads.found == ["aten::_local_scalar_dense"]
    assert len(model.calls) == 4


def test_no_token_and_no_expert_for_any_token(sm100_library):
    sm100_library()
    (hidden, topk_weights, ids), packed = call_of(), pack(weights_of(SILU, biases=True))
    assert packed.workspace_bytes(0, T) == 0
    assert run_experts(packed, hidden[:0], topk_weights[:0], ids[:0]).shape == (0, H)
    assert not run_experts(packed, hidden, topk_weights, torch.full_like(ids, -1)).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_token_that_is_not_finite_affects_itself_alone(sm100_library):
    sm100_library()
    packed, (hidden, topk_weights, ids) = pack(weights_of()), call_of()
    want = run_experts(packed, hidden, topk_weights, ids)
    hidden[3, 40] = torch.inf
    got = run_experts(packed, hidden, topk_weights, ids)
    assert got[3].isnan().all()
    others = torch.arange(M, device=DEVICE) != 3
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, d, ends: (a, (b[0].view(torch.uint8), b[1]), d, ends),
        lambda a, b, d, ends: ((a[0], a[1].contiguous()), b, d, ends),
        lambda a, b, d, ends: ((a[0], a[1][:, :1]), b, d, ends),
        lambda a, b, d, ends: (a, (b[0], b[1].contiguous()), d, ends),
        lambda a, b, d, ends: (a, b, d.float(), ends),
        lambda a, b, d, ends: (a, b, d, ends.long()),
    ],
    ids=["uint8 codes", "row-major rows", "too few words", "row-major weights", "float32", "int64"],
)
def test_the_model_refuses_what_deep_gemm_does(sm100_library, wrong):
    model = sm100_library()
    run_experts(pack(weights_of()), *call_of())
    _, *call = model.calls[0]
    options = {"recipe_a": (1, 32), "recipe_b": (1, 32), "use_psum_layout": True}
    options["ensure_zero_padding"] = False
    model.m_grouped_fp8_fp4_gemm_nt_contiguous(*call, **options)
    with pytest.raises(AssertionError):
        model.m_grouped_fp8_fp4_gemm_nt_contiguous(*wrong(*call), **options)
