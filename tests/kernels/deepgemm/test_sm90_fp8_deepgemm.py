"""Our part of DeepGEMM's backends; in the interpreter around GEMMs that torch computes.

What the package itself makes of the same calls is tested on a GPU, in
tests/runtime/test_hopper_libraries.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.errors import UnsupportedError
from moequant.formats import quantize
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.deepgemm import sm90_fp8_deepgemm
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY
from moequant.runtime.batched import finalize_batched, prepare_batched
from moequant.runtime.call import run_experts
from moequant.runtime.packing import workload_of
from moequant.runtime.routing import route

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the package itself is tested on a GPU")

E, H, I, M, T = 4, 256, 144, 9, 2
FUNCTIONS = [SILU, SWIGLUOAI, SITU, RELU2, ActFn(name="gelu", gated=False, limit=0.5)]

# As in tests/runtime/test_hopper_libraries.py: both results are rounded to bfloat16, which flips
# codes.
CALC_DIFF = 1e-3


class Library:
    """What is called of deep_gemm, in float32, with the same layouts.

    The alignment of rows is a setting of the process here too.
    """

    alignment = 128

    def get_mk_alignment_for_contiguous_layout(self):
        return Library.alignment

    def set_mk_alignment_for_contiguous_layout(self, alignment):
        Library.alignment = alignment

    @staticmethod
    def product(x, scale, w, w_scale):
        def spread(s, rows, columns):
            return s.repeat_interleave(128, 1)[:rows, :columns]

        x = x.float() * spread(scale, *x.shape)
        w = w.float() * spread(w_scale.repeat_interleave(128, 0), *w.shape)
        return (x @ w.mT).bfloat16()

    def m_grouped_fp8_gemm_nt_contiguous(
        self, x, w, out, row_end, use_psum_layout, ensure_zero_padding
    ):
        assert use_psum_layout
        begin = 0
        for e, end in enumerate(row_end.tolist()):
            rows = slice(begin, end)
            out[rows] = self.product(x[0][rows], x[1][rows], w[0][e], w[1][e])
            begin = -(-end // self.alignment) * self.alignment

    def m_grouped_fp8_gemm_nt_masked(self, x, w, out, counts, expected):
        for e, count in enumerate(counts.tolist()):
            out[e, :count] = self.product(x[0][e, :count], x[1][e, :count], w[0][e], w[1][e])


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setattr(sm90_fp8_deepgemm, "library", Library)


def weights_of(act_fn=SILU, biases=False):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del shapes["gate"]
    parts = {"gate": None}
    for name, shape in shapes.items():
        parts[name] = quantize(torch.randn(shape, generator=g) * shape[2] ** -0.5, "fp8_block")
        if biases:
            parts[f"{name}_bias"] = torch.randn(shape[:2], generator=g)
    return ExpertWeights(**parts, act_fn=act_fn)


def call_of(dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(M, H, generator=g).to(dtype)
    topk_weights, ids = torch.rand(M, E, generator=g).topk(T)
    ids[0, 0] = -1
    return hidden, topk_weights, ids


def pack(weights):
    return packed_by("deepgemm", weights)


def packed_by(name, weights):
    """As the backend packs them, which runs on GPUs alone."""
    backend = REGISTRY[name]
    return backend.load(backend.layout.pack(weights), workload_of(weights, "format"))


def check(got, weights, call, **options):
    want = FusedExperts(weights, backend="torch_reference")(*call, **options)
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    assert calc_diff(got, want) <= CALC_DIFF


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", FUNCTIONS, ids=str)
def test_every_function_with_and_without_biases(act_fn, biases):
    weights, call = weights_of(act_fn, biases), call_of()
    check(run_experts(pack(weights), *call), weights, call)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", FUNCTIONS, ids=str)
def test_batches_too(act_fn, biases):
    weights, (hidden, topk_weights, ids) = weights_of(act_fn, biases), call_of()
    routing = route(topk_weights, ids, experts=E)
    tokens, places = prepare_batched(hidden, routing, experts=E, capacity=M, scheme="fp8_group128")
    rows = packed_by("deepgemm_batched", weights).run_batches(tokens)
    check(finalize_batched(rows, routing, places), weights, (hidden, topk_weights, ids))


@pytest.mark.parametrize("alignment", [64, 128, 256])
def test_the_alignment_another_library_has_set_is_put_back(monkeypatch, alignment):
    weights, call = weights_of(), call_of()
    want = run_experts(pack(weights), *call)
    monkeypatch.setattr(Library, "alignment", alignment)
    assert torch.equal(run_experts(pack(weights), *call), want)
    assert Library.alignment == alignment


def test_the_alignment_is_put_back_after_a_gemm_that_fails(monkeypatch):
    def fails(*_, **__):
        assert Library.alignment == 128
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(Library, "alignment", 64)
    monkeypatch.setattr(Library, "m_grouped_fp8_gemm_nt_contiguous", fails)
    with pytest.raises(RuntimeError, match="no nvcc"):
        run_experts(pack(weights_of()), *call_of())
    assert Library.alignment == 64
    # The next call is not kept waiting by the one that failed.
    with pytest.raises(RuntimeError, match="no nvcc"):
        run_experts(pack(weights_of()), *call_of())


def test_a_release_that_sets_the_alignment_in_its_extension_module_alone(monkeypatch):
    setter = Library.set_mk_alignment_for_contiguous_layout
    monkeypatch.setattr(Library, "alignment", 64)
    monkeypatch.delattr(Library, "set_mk_alignment_for_contiguous_layout")
    extension = SimpleNamespace(
        set_mk_alignment_for_contiguous_layout=lambda value: setter(None, value)
    )
    monkeypatch.setattr(Library, "_C", extension, raising=False)
    weights, call = weights_of(), call_of()
    check(run_experts(pack(weights), *call), weights, call)
    assert Library.alignment == 64


def test_another_alignment_that_cannot_be_set_is_refused(monkeypatch):
    monkeypatch.setattr(Library, "alignment", 64)
    monkeypatch.delattr(Library, "set_mk_alignment_for_contiguous_layout")
    with pytest.raises(UnsupportedError, match=r"layout is 64, but these experts need 128"):
        run_experts(pack(weights_of()), *call_of())


def test_biases_are_those_of_the_expert():
    # Weights of zero: what an expert gives is its bias, through the second GEMM and behind it.
    weights = weights_of(RELU2, biases=True)
    zero = {n: torch.zeros_like(t) for n, t in weights.tensors().items() if "qdata" in n}
    weights = weights.replace({**weights.tensors(), **zero})
    hidden, topk_weights, ids = call_of()
    got = run_experts(pack(weights), hidden, topk_weights, ids)
    here = (ids >= 0)[..., None]
    want = (weights.down_bias[ids.clamp(min=0)] * topk_weights[..., None] * here).sum(1)
    torch.testing.assert_close(got, want, rtol=0, atol=4 * 2.0**-24 * float(want.abs().max()))


def test_an_expert_map_counts_and_biases_follow_it():
    weights, (hidden, topk_weights, ids) = weights_of(SWIGLUOAI, biases=True), call_of()
    here = torch.tensor([2, -1, 0, 3])
    call = (hidden, topk_weights, ids)
    got = run_experts(pack(weights), *call, expert_map=here)
    check(got, weights, call, expert_map=here)


def test_the_workspace_is_as_large_as_was_said_and_may_hold_anything():
    weights, call = weights_of(SILU, biases=True), call_of()
    packed = pack(weights)
    size = packed.workspace_bytes(M, T)
    assert size > 0
    want = run_experts(packed, *call)
    check(want, weights, call)
    for byte in (0x7F, 0xFF, 0x00):
        memory = torch.full((size + 64,), byte, dtype=torch.uint8)
        assert torch.equal(run_experts(packed, *call, workspace=memory[:size]), want)
        assert bool((memory[size:] == byte).all())


def test_the_plan_takes_nothing_but_the_arena():
    packed, arena = pack(weights_of()), WorkspaceArena()
    plan = packed.plan(M, T, arena, torch.float32)
    assert {t.device.type for t in (plan.x, plan.x_scale, plan.gate_up, plan.act, plan.y)} == {
        "meta"
    }
    assert arena.size_bytes == packed.workspace_bytes(M, T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_in_the_dtype_of_the_hidden_states(dtype):
    weights, call = weights_of(), call_of(dtype)
    check(run_experts(pack(weights), *call), weights, call)


def test_no_token_and_no_expert_for_any_token():
    (hidden, topk_weights, ids), packed = call_of(), pack(weights_of(SILU, biases=True))
    assert packed.workspace_bytes(0, T) == 0
    assert run_experts(packed, hidden[:0], topk_weights[:0], ids[:0]).shape == (0, H)
    assert not run_experts(packed, hidden, topk_weights, torch.full_like(ids, -1)).any()


def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here():
    weights, (hidden, topk_weights, ids) = (
        weights_of(SWIGLUOAI, biases=True),
        call_of(torch.bfloat16),
    )
    packed, x = pack(weights), quantize_activations(hidden, "fp8_group128")
    size = packed.workspace_bytes(M, T)
    want = run_experts(packed, hidden, topk_weights, ids)
    for byte in (0x7F, 0xFF):
        memory = torch.full((size,), byte, dtype=torch.uint8)
        got = run_experts(
            packed, x.qdata, topk_weights, ids, hidden_scale=x.scale, workspace=memory
        )
        assert torch.equal(got, want)
    # Column-major scales, as other kernels leave them.
    strided = x.scale.mT.contiguous().mT
    got = run_experts(packed, x.qdata, topk_weights, ids, hidden_scale=strided)
    assert torch.equal(got, want)
