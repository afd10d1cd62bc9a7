"""vLLM's functions for FP4 by FP4, compared with the reference.

Without a GPU of SM100, torch computes the grouped GEMMs from what their launch is given, and
Triton's interpreter runs the other kernels.
"""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.benchmarks.experts import calc_diff
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import quantize
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import (
    ExpertWeights,
    FusedExperts,
    run_cutlass_moe_fp4,
    run_cutlass_moe_mxfp4,
)
from moequant.runtime.backends import REGISTRY, Workload

E, H, I, T, M = 5, 160, 96, 2, 7
BACKEND = REGISTRY["cutlass_fp4"]
GSCALES = {"a1": torch.linspace(300.0, 900.0, E), "a2": torch.linspace(500.0, 1500.0, E)}
# As derived in test_cutlass_fp4.py for many rows. Here are 14 rows of three groups: one E8M0 scale
# between the GEMMs that moves to its neighbour changes its group by sqrt(2) * 11 % of its norm,
# which is 3e-4 where groups are equal, and a few may.
CALC_DIFF = 3e-3

ON_SM100 = BACKEND.supports(
    Workload(
        format="mxfp4",
        activations="mxfp4",
        experts=E,
        hidden=H,
        intermediate=I,
        device=torch.device("cuda", 0),
    )
)
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(ON_SM100 is not None, reason=f"cutlass_fp4 {ON_SM100}"),
        ],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def anywhere(request, fp4_on_cpu):
    """On a CPU, the backend with GEMMs of torch; tests of refusals have it as it is."""
    if request.node.callspec.params.get("device") == "cpu":
        fp4_on_cpu()


def layer(format, act_fn=SILU, *, static=False, device="cpu"):
    """The experts, and the arguments of vLLM's function that stand for them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del shapes["gate"]
    parts = {n: torch.randn(s, generator=generator) * s[2] ** -0.5 for n, s in shapes.items()}
    quantized = {n: quantize(w.to(device), format) for n, w in parts.items()}
    gscales = {n: s.to(device) for n, s in GSCALES.items()} if static else {}
    scales = {}
    if static:
        scales = {
            "gate_up_input_scale": gscales["a1"].reciprocal(),
            "down_input_scale": gscales["a2"].reciprocal(),
        }
    weights = ExpertWeights.of(quantized, act_fn, **scales)
    t = BACKEND.layout.pack(weights)
    given = {
        "w1_fp4": t["w13_qdata"],
        "w1_blockscale": t["w13_scale"],
        "w2_fp4": t["w2_qdata"],
        "w2_blockscale": t["w2_scale"],
        "activation": act_fn,
    }
    if format == "nvfp4":
        of = {"a1": t["w13_global_scale"], "a2": t["w2_global_scale"]}
        for n, alphas in of.items():
            g = gscales.get(n)
            given[f"{n}_gscale"] = g
            if g is not None:
                alphas = alphas / g.view(E, *[1] * (alphas.dim() - 1))
            given[f"w{n[1]}_alphas"] = alphas
    return weights, given


def call(dtype=torch.bfloat16, device="cpu"):
    g = torch.Generator().manual_seed(2)
    router, ids = torch.rand(M, E, generator=g).topk(T)
    ids[0, 1] = -1
    hidden = torch.randn(M, H, generator=g).to(dtype)
    return hidden.to(device), router.to(device), ids.int().to(device)


def run(format, given, hidden, router, ids, **options):
    function = {"nvfp4": run_cutlass_moe_fp4, "mxfp4": run_cutlass_moe_mxfp4}[format]
    arguments = {
        "output": torch.full_like(hidden, torch.nan),
        "a": hidden,
        "topk_weights": router,
        "topk_ids": ids,
    }
    arguments |= given | options
    got = function(**arguments)
    assert got is arguments["output"]
    return got


def reference(weights, *call, **options):
    experts = FusedExperts(weights, activations=weights.format, backend="torch_reference")
    return experts(*call, **options)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            run_cutlass_moe_fp4,
            "output a a1_gscale w1_fp4 w1_blockscale w1_alphas a2_gscale w2_fp4 w2_blockscale "
            "w2_alphas topk_weights topk_ids activation apply_router_weight_on_input",
        ),
        (
            run_cutlass_moe_mxfp4,
            "output a w1_fp4 w1_blockscale w2_fp4 w2_blockscale topk_weights topk_ids activation "
            "apply_router_weight_on_input",
        ),
    ],
)
def test_arguments_are_those_of_vllm_in_its_order(function, names):
    """Of `cutlass_moe.py` in 00606a9, without m, n, k, e, device, workspaces and config."""
    assert list(inspect.signature(function).parameters) == names.split()


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
@pytest.mark.parametrize(("format", "static"), [("nvfp4", 1), ("nvfp4", 0), ("mxfp4", 0)])
def test_they_compute_what_the_reference_does(format, static, act_fn, dtype, device):
    weights, given = layer(format, act_fn, static=static, device=device)
    hidden, router, ids = call(dtype, device)
    got = run(format, given, hidden, router, ids)
    assert calc_diff(got, reference(weights, hidden, router, ids)) <= CALC_DIFF


@on_devices
def test_gate_and_up_may_share_an_alpha(device):
    weights, given = layer("nvfp4", static=True, device=device)
    one = weights.tensors()
    one["gate_global_scale"] = one["up_global_scale"]
    given["w1_alphas"] = one["up_global_scale"] / given["a1_gscale"]
    got = run("nvfp4", given, *call(device=device))
    assert calc_diff(got, reference(weights.replace(one), *call(device=device))) <= CALC_DIFF


@on_devices
def test_scales_of_mxfp4_may_come_as_bytes(device):
    _, given = layer("mxfp4", device=device)
    as_bytes = {n: given[n].view(torch.uint8) for n in ("w1_blockscale", "w2_blockscale")}
    want = run("mxfp4", given, *call(device=device))
    assert torch.equal(run("mxfp4", given | as_bytes, *call(device=device)), want)


@on_devices
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_router_weights_multiply_the_input_and_leave_it_as_it_is(format, device):
    weights, given = layer(format, device=device)
    hidden, router, ids = call(device=device)
    one, before = (hidden, router[:, :1], ids[:, :1]), hidden.clone()
    options = {"apply_router_weight_on_input": True}
    got = run(format, given, *one, **options)
    assert torch.equal(hidden, before)
    assert calc_diff(got, reference(weights, *one, **options)) <= CALC_DIFF
    with pytest.raises(UnsupportedError, match="needs one expert per token"):
        run(format, given, hidden, router, ids, **options)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a2_gscale": None}, UnsupportedError, "a2_gscale is None, but a1_gscale is given; give"),
        ({"a1_gscale": None}, UnsupportedError, "a1_gscale is None, but a2_gscale is given; give"),
        ({"w2_fp4": "w1_fp4"}, UnsupportedError, r"must be \[E, 2 \* I, H / 2\] and \[E, H, I"),
        (
            {"w1_blockscale": "w2_blockscale"},
            CheckpointError,
            "w1_blockscale is .*it must be.*swizzle",
        ),
        ({"w2_alphas": torch.ones(E, 1)}, CheckpointError, r"w2_alphas is .* \[5, 1\], but for E"),
        (
            {"w1_alphas": torch.ones(E, 3)},
            CheckpointError,
            r"it must be float32 \[5, 2\]; or \[E\]",
        ),
        (
            {"w1_alphas": torch.ones(E + 1)},
            CheckpointError,
            rf"^w1_alphas is float32 \[{E + 1}\], but for E {E}",
        ),
        ({"a1_gscale": torch.ones(1)}, CheckpointError, r"a1_gscale is float32 \[1\], but for E 5"),
        (
            {"w1_fp4": torch.zeros(E, 2 * I, H // 2)},
            CheckpointError,
            "w1_fp4 is float32.* such codes",
        ),
        ({"w2_alphas": 1.0}, UnsupportedError, "w2_alphas is float, but must be a tensor"),
        ({"output": None}, UnsupportedError, "output is NoneType, but must be a tensor"),
        ({"output": torch.ones(M, H)}, UnsupportedError, "output is torch.float32"),
        ({"a": torch.ones(M, 8)}, UnsupportedError, r"^a is \[\d+, 8\], but these experts need"),
        ({"activation": "silu"}, UnsupportedError, "the activation function is 'silu'"),
        (
            {"a2_gscale": torch.ones(E, device="meta")},
            UnsupportedError,
            "a2_gscale is on meta, but the first weight is on cpu; move it there",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, error, message, device):
    _, given = layer("nvfp4", static=True)
    changed = {n: given[v] if isinstance(v, str) and v in given else v for n, v in change.items()}
    with pytest.raises(error, match=message):
        run("nvfp4", given | changed, *call())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_elsewhere_they_say_what_there_is_what_they_want_and_what_to_do(format):
    _, given = layer(format)
    function = {"nvfp4": "run_cutlass_moe_fp4", "mxfp4": "run_cutlass_moe_mxfp4"}[format]
    with pytest.raises(UnsupportedError, match=function) as refused:
        run(format, given, *call())
    said = str(refused.value)
    for part in (
        "cutlass_fp4 (compiled, never run) on SM100 (compute capability 10.0)",
        "on cpu: needs a CUDA device",
        'activations="none"',
        "moequant.layouts.swizzle_128x4.unswizzle",
    ):
        assert part in said
