"""FP4 by FP4 as a backend, whose kernels were never run; results want SM100.

Without SM100, torch computes the GEMMs and Triton's interpreter runs the other kernels. The layout
is tested with the others in test_every_backend.py, the plan and the batches bit by bit in
tests/kernels/cutlass/test_sm100_fp4_launch.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.benchmarks.experts import calc_diff
from moequant.errors import UnsupportedError
from moequant.formats import quantize
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.cutlass import sm100_fp4_fused as fused
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts
from moequant.runtime.activations import SCHEMES as SCHEMES_OF_ACTIVATIONS
from moequant.runtime.backends import REGISTRY, Workload, cutlass_fp4
from moequant.runtime.batched import prepare_batched
from moequant.runtime.packing import workload_of
from moequant.runtime.routing import route

NAMES = ("cutlass_fp4", "cutlass_fp4_batched")
BACKEND = REGISTRY["cutlass_fp4"]
WORKLOAD = Workload(
    format="nvfp4",
    activations="nvfp4",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)
SCHEMES = (("nvfp4", "nvfp4"), ("nvfp4", "nvfp4_static"), ("mxfp4", "mxfp4"))
WHY_NOT = BACKEND.supports(WORKLOAD)

# Rounding gate and up to bfloat16 moves a value between the GEMMs by 2**-9 / sqrt(3) of it, which
# moves 2**-10 / 0.3 of the codes to a neighbour, about 0.33 of the value away, and 2**-10 / 0.09 of
# the E4M3 scales, 0.09 away: an error of sqrt(3.6e-4 + 8e-5) = 2.1 % of the norm, and a calc_diff
# of half its square, 2.2e-4.
CALC_DIFF = 1e-3


def weights_of(format, act_fn=SILU, *, static=False, device="cpu", H=256, I=160):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (8, I, H), "up": (8, I, H), "down": (8, H, I)}
    if not act_fn.gated:
        del shapes["gate"]
    parts = {n: torch.randn(s, generator=g) * s[2] ** -0.5 for n, s in shapes.items()}
    names = ("gate_up_input_scale", "down_input_scale") if static else ()
    scales = {n: torch.linspace(1e-3, 2e-3, 8, device=device) for n in names}
    quantized = {n: quantize(w.to(device), format) for n, w in parts.items()}
    return ExpertWeights.of(quantized, act_fn, **scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "fp8_block"}, "runs only nvfp4 and mxfp4"),
        ({"activations": "mxfp4"}, "takes only activations in nvfp4 or nvfp4_static"),
        ({"format": "mxfp4", "activations": "none"}, "takes only activations in mxfp4"),
        ({"hidden": 48}, "needs H to be a multiple of 32, not 48"),
        ({"intermediate": 80}, "needs I to be a multiple of 32, not 80"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_it_says_what_it_does_not_run(change, reason, name):
    assert REGISTRY[name].supports(replace(WORKLOAD, **change)) == reason


@pytest.mark.parametrize("capability", [(9, 0), (10, 3), (12, 0)])
def test_other_generations_of_gpu_do_not_run_it(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cutlass_fp4._why_not_on.cache_clear()
    want = "needs compute capability 10.0, and cuda:0 has {}.{}".format(*capability)
    assert BACKEND.supports(WORKLOAD) == want
    cutlass_fp4._why_not_on.cache_clear()


def test_it_is_no_default():
    assert BACKEND.default_on == ()


def test_it_serves_sm100_with_activations_in_the_format_of_the_weights():
    serves = {s: BACKEND.serves("sm100", s) for s in SCHEMES_OF_ACTIVATIONS}
    assert {s: list(f) for s, f in serves.items() if f} == {
        "nvfp4": ["nvfp4"], "nvfp4_static": ["nvfp4"], "mxfp4": ["mxfp4"]
    }  # fmt: skip
    assert not any(BACKEND.serves("sm90", s) for s in SCHEMES_OF_ACTIVATIONS)


@pytest.mark.parametrize(("H", "I"), [(48, 32), (32, 48)])
def test_its_layout_holds_rows_that_tma_reads(H, I):
    with pytest.raises(UnsupportedError, match=rf"multiples of 32, not H {H} and I {I}; without"):
        BACKEND.layout.pack(weights_of("nvfp4", H=H, I=I))


def test_its_layout_holds_fp4_alone():
    with pytest.raises(UnsupportedError, match="stacked_tiles holds nvfp4 and mxfp4, not mxfp8"):
        BACKEND.layout.pack(weights_of("mxfp8"))


@pytest.mark.parametrize(("format", "activations"), SCHEMES)
def test_a_plan_has_the_format_and_its_static_scales(format, activations):
    weights = weights_of(format, static=activations == "nvfp4_static")
    workload = workload_of(weights, format)
    assert workload.activations == activations
    experts = BACKEND.load(BACKEND.layout.pack(weights), workload)
    arena = WorkspaceArena()
    plan = experts.plan(5, 2, arena, torch.bfloat16)
    assert plan.gemms.variant.name == format
    assert ("w13_input_scale" in plan.gemms.tensors) == (activations == "nvfp4_static")
    assert experts.workspace_bytes(5, 2) == arena.size_bytes
    assert plan.gemms.tensors["w13_scale"].shape == (8, 384, 256 // plan.gemms.variant.group)


def call_of(M, device):
    g = torch.Generator(device).manual_seed(M)
    hidden = torch.randn(M, 256, generator=g, device=device).bfloat16()
    router = torch.rand(M, 2, generator=g, device=device)
    return hidden, router, torch.rand(M, 8, generator=g, device=device).topk(2).indices


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, which has tests of its own")
@pytest.mark.parametrize(
    ("name", "act_fn"),
    [
        (NAMES[0], SILU),
        (NAMES[1], RELU2),
        pytest.param(NAMES[0], RELU2, marks=pytest.mark.full),
        pytest.param(NAMES[1], SILU, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize(("format", "activations"), SCHEMES)
def test_it_computes_what_the_reference_does_but_for_the_gemm(
    format, activations, act_fn, name, fp4_on_cpu
):
    fp4_on_cpu()
    weights = weights_of(format, act_fn, static=activations == "nvfp4_static", H=96, I=64)
    hidden, router, ids = call_of(40, "cpu")
    call = hidden[:, :96], router, ids.int().masked_fill(ids == 3, -1)
    got, want = (
        FusedExperts(weights, activations=format, backend=n)(*call)
        for n in (name, "torch_reference")
    )
    assert calc_diff(got, want) <= CALC_DIFF


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, which has tests of its own")
def test_descriptors_are_encoded_once_for_calls_of_a_size(fp4_on_cpu, monkeypatch):
    fp4_on_cpu()
    gemm, made = fused.Fp4GroupedGemm, []
    monkeypatch.setattr(fused, "Fp4GroupedGemm", lambda *a, **k: made.append(k) or gemm(*a, **k))
    experts = FusedExperts(weights_of("mxfp4"), activations="mxfp4", backend="cutlass_fp4")
    workspace = torch.empty(experts.workspace_bytes(9, 2), dtype=torch.uint8)
    outs = [experts(*call_of(9, "cpu"), workspace=workspace) for _ in range(2)]
    assert torch.equal(*outs)
    assert len(made) == 2
    experts(*call_of(8, "cpu"), workspace=workspace)
    assert len(made) == 4


def test_batches_hold_tokens_that_are_not_quantized(fp4_on_cpu):
    fp4_on_cpu()
    packed = pack_experts(weights_of("mxfp4"), backend="cutlass_fp4_batched", activations="mxfp4")
    hidden, router, ids = call_of(5, "cpu")
    routing = route(router, ids, experts=8)
    tokens, _ = prepare_batched(hidden, routing, experts=8, capacity=5, scheme="fp8_token")
    with pytest.raises(UnsupportedError, match=r"in fp8_token, but .*mxfp4 take batches in none"):
        packed.run_batches(tokens)


@pytest.mark.gpu
@pytest.mark.skipif(WHY_NOT is not None, reason=f"cutlass_fp4 {WHY_NOT}")
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
@pytest.mark.parametrize(("format", "activations"), SCHEMES)
@pytest.mark.parametrize("M", [0, 1, 33, 700])
@pytest.mark.parametrize("name", NAMES)
def test_it_agrees_with_the_reference(format, activations, act_fn, M, name):
    weights = weights_of(format, act_fn, static=activations == "nvfp4_static", device="cuda")
    call = call_of(M, "cuda")
    got, want = (
        FusedExperts(weights, activations=format, backend=n)(*call)
        for n in (name, "torch_reference")
    )
    assert got.shape == want.shape
    assert bool(got.isfinite().all())
    assert M == 0 or calc_diff(got, want) <= CALC_DIFF
