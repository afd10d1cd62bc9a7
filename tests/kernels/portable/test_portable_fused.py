from __future__ import annotations

import dataclasses

import pytest
import torch

from moequant.act_fn import RELU2, SITU, SWIGLUOAI, ActFn
from moequant.formats import RUNNABLE, get_format
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.portable.portable_fused import TILE_ROWS, PortablePlan, batched_experts
from moequant.runtime import FusedExperts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY as BACKENDS
from moequant.runtime.batched import finalize_batched, lay_out, prepare_batched
from moequant.runtime.call import run_experts as fused_experts
from moequant.runtime.packing import workload_of
from moequant.runtime.routing import route

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# Hidden states are float32, so that nothing is rounded but sums: as a random walk of K <= 300 terms
# they are off by sqrt(K) 2**-24 = 1e-6 of their norm, and the two GEMMs and the reduction add up.
EXACT = 1e-5
# Activations that are quantized in the middle flip to the next code with probability d / ulp for a
# relative error d = 1e-6 in front (E4M3: ulp about 2**-3.5), and a flip costs an ulp. So of the
# 2000 values here none flips, or one: ulp / sqrt(2000) = 2e-3.
QUANTIZED = 5e-3


def packed_for(weights, scheme):
    """As the backend packs them, which runs on GPUs alone."""
    triton = BACKENDS["triton"]
    workload = dataclasses.replace(workload_of(weights, "format"), activations=scheme)
    return triton.load(triton.layout.pack(weights), workload)


def check(got, want, scheme):
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    limit = EXACT if scheme == "none" else QUANTIZED
    assert (got - want).norm() <= limit * want.norm()


def run(weights, call, activations="format", **options):
    """The output, compared with the float32 reference."""
    scheme = get_format(weights.format).activations if activations == "format" else "none"
    got = fused_experts(packed_for(weights, scheme), *call, **options)
    reference = FusedExperts(weights, backend="torch_reference", activations=activations)
    check(got, reference(*call, **options), scheme)
    return got


@pytest.mark.parametrize("activations", ["format", "none"])
@pytest.mark.parametrize("format", RUNNABLE)
def test_every_format_computes_what_the_reference_does(weights, call, format, activations):
    run(weights(format), call(), activations)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "bf16"])
def test_last_blocks_may_be_incomplete(weights, call, format):
    run(weights(format, H=200, I=72), call(H=200))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_last_groups_may_be_incomplete(weights, call, format):
    run(weights(format, H=288, I=96), call(H=288))


@pytest.mark.parametrize(
    "format", ["fp8_block", pytest.param("w4a8", marks=pytest.mark.full), "mxfp4"]
)
@pytest.mark.parametrize(
    "act_fn",
    [
        SWIGLUOAI,
        SITU,
        RELU2,
        ActFn(name="gelu"),
        ActFn(name="gelu_tanh", gated=False, limit=0.5),
        ActFn(name="swiglustep", limit=0.5),
        ActFn(name="swigluoai", alpha=0.75, beta=-0.25),
    ],
    ids=str,
)
def test_functions_and_biases(weights, call, act_fn, format):
    run(weights(format, I=256, act_fn=act_fn, biases=True), call())


def test_an_expert_map_and_ids_without_an_expert(weights, call):
    hidden, topk_weights, ids = call(E=8)
    here = torch.tensor([3, -1, 0, -1, 1, 2, -1, -1], device=DEVICE)
    run(weights("mxfp4"), (hidden, topk_weights, ids), expert_map=here)
    far = ids.clone()
    far[far == 1] = 1 << 33
    packed = packed_for(weights("mxfp4"), "none")
    got = fused_experts(packed, hidden, topk_weights, far, expert_map=here)
    want = fused_experts(packed, hidden, topk_weights, ids, expert_map=here)
    assert torch.equal(got, want)


def test_no_token_and_no_expert_for_any_token(weights, call):
    hidden, topk_weights, ids = call()
    packed = packed_for(weights("fp8_block"), "fp8_group128")
    none = fused_experts(packed, hidden[:0], topk_weights[:0], ids[:0])
    assert none.shape == (0, 256)
    assert not fused_experts(packed, hidden, topk_weights, torch.full_like(ids, -1)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_of_16_bits(weights, call, dtype):
    hidden, topk_weights, ids = call(dtype=dtype)
    packed = packed_for(weights("bf16"), "none")
    got = fused_experts(packed, hidden, topk_weights, ids)
    assert got.dtype == dtype
    # As the same numbers in float32, but for the result, and for bfloat16 what lies between. The
    # interpreter does not round to bfloat16 but truncates: each of 3 roundings costs 2**-7 at most.
    want = fused_experts(packed, hidden.float(), topk_weights, ids)
    limit = 2.0**-11 if dtype == torch.float16 else 3 * 2.0**-7
    assert (got.float() - want).norm() <= limit * want.norm()


@pytest.mark.parametrize(
    ("format", "tile_rows"), [("fp8_block", 16), ("w4a8", 32), ("nvfp4", TILE_ROWS[-1])]
)
def test_no_buffer_is_read_before_it_is_written(weights, call, format, tile_rows):
    w, (hidden, topk_weights, ids) = weights(format), call(M=40)
    scheme = get_format(format).activations
    packed = packed_for(w, scheme)
    size = WorkspaceArena()
    PortablePlan(packed.kernel_weights, 40, 2, size, torch.float32, tile_rows=tile_rows)
    # Bytes of 0x7F are NaN in E4M3, huge numbers in float32, and absurd indices.
    for byte in (0x7F, 0xFF):
        memory = torch.full((size.size_bytes,), byte, dtype=torch.uint8, device=DEVICE)
        arena = WorkspaceArena(memory)
        plan = PortablePlan(packed.kernel_weights, 40, 2, arena, torch.float32, tile_rows=tile_rows)
        out = torch.full_like(hidden, torch.nan)
        plan(hidden, topk_weights, ids, out)
        check(out, FusedExperts(w, backend="torch_reference")(hidden, topk_weights, ids), scheme)


def test_the_workspace_is_as_large_as_was_said(weights, call):
    packed, inputs = packed_for(weights("w4a8"), "fp8_token"), call()
    size = packed.workspace_bytes(9, 2)
    memory = torch.zeros(size + 64, dtype=torch.uint8, device=DEVICE)
    guard = memory[size:].clone()
    got = fused_experts(packed, *inputs, workspace=memory[:size])
    assert torch.equal(memory[size:], guard)
    assert torch.equal(got, fused_experts(packed, *inputs))
    smaller = WorkspaceArena()
    packed.plan(9, 2, smaller, torch.bfloat16)
    assert smaller.size_bytes < size


@pytest.mark.parametrize(
    ("format", "options"),
    [
        *((format, {}) for format in RUNNABLE),
        ("fp8_channel", {"act_fn": RELU2, "biases": True}),
        ("mxfp4", {"act_fn": SWIGLUOAI, "biases": True}),
    ],
)
def test_a_batch_for_each_expert_computes_the_same(weights, call, format, options):
    w, (hidden, topk_weights, ids) = weights(format, **options), call()
    scheme = get_format(format).activations
    routing = route(topk_weights, ids, experts=4)
    tokens, places = prepare_batched(hidden, routing, experts=4, capacity=9, scheme=scheme)
    codes = tokens.qdata if tokens.scale is None else tokens.qdata.view(torch.uint8)
    beyond = torch.arange(9, device=DEVICE)[None, :] >= tokens.counts[:, None]
    codes[beyond] = 0x7F  # NaN, in codes
    rows = batched_experts(packed_for(w, scheme).kernel_weights, codes, tokens.scale, tokens.counts)
    assert rows.shape == (4, 9, 256)
    got = finalize_batched(rows, routing, places)
    want = FusedExperts(w, backend="torch_reference")(hidden, topk_weights, ids)
    if rows.dtype == torch.bfloat16:  # truncated by the interpreter
        assert (got - want).norm() <= 2.0**-7 * want.norm()
    else:
        check(got, want, scheme)


@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        ("fp8_block", "fp8_group128"),
        ("w4a8", "fp8_token"),
        ("fp8_tensor", "fp8_token"),
        ("fp8_tensor", "fp8_tensor"),
    ],
)
def test_hidden_states_that_come_quantized_give_the_bits_of_those_quantized_here(
    weights, call, format, scheme
):
    w, (hidden, topk_weights, ids) = weights(format), call(dtype=torch.bfloat16)
    packed, x = packed_for(w, scheme), quantize_activations(hidden, scheme)
    size = packed.workspace_bytes(9, 2)
    memory = torch.full((size,), 0x7F, dtype=torch.uint8, device=DEVICE)
    got = fused_experts(packed, x.qdata, topk_weights, ids, hidden_scale=x.scale, workspace=memory)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, fused_experts(packed, hidden, topk_weights, ids))
    none = fused_experts(packed, x.qdata[:0], topk_weights[:0], ids[:0], hidden_scale=x.scale[:0])
    assert none.shape == (0, 256)
    assert none.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("format", "options"), [("fp8_channel", {"biases": True}), ("fp8_tensor", {"act_fn": RELU2})]
)
def test_one_scale_of_all_tokens_and_of_all_rows(weights, call, format, options):
    w, (hidden, topk_weights, ids) = weights(format, **options), call()
    ids[3:5] = -1
    packed = packed_for(w, "fp8_tensor")
    reference = FusedExperts(w, backend="torch_reference", activations="fp8_tensor")
    want = reference(hidden, topk_weights, ids)
    # Bytes of the largest numbers, which would make the largest scales.
    memory = torch.full((packed.workspace_bytes(9, 2),), 0x7F, dtype=torch.uint8, device=DEVICE)
    check(fused_experts(packed, hidden, topk_weights, ids, workspace=memory), want, "fp8_tensor")

    x = quantize_activations(hidden, "fp8_tensor")
    routing = route(topk_weights, ids, experts=4)
    tokens, places = lay_out(x, routing, experts=4, capacity=9)
    beyond = torch.arange(9, device=DEVICE)[None, :] >= tokens.counts[:, None]
    tokens.scale[beyond] = torch.nan
    rows = batched_experts(
        packed.kernel_weights, tokens.qdata.view(torch.uint8), tokens.scale, tokens.counts
    )
    # bfloat16 rows, truncated by the interpreter.
    batched = finalize_batched(rows, routing, places)
    assert (batched - want).norm() <= 2.0**-7 * want.norm()


def test_zeros_with_one_scale_are_zeros(weights, call):
    hidden, topk_weights, ids = call()
    packed = packed_for(weights("fp8_tensor"), "fp8_tensor")
    assert not fused_experts(packed, torch.zeros_like(hidden), topk_weights, ids).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_or_inf_in_a_token_makes_all_that_share_its_scale_nan(weights, call, poison):
    hidden, topk_weights, ids = call()
    hidden[4, 7] = poison
    packed = packed_for(weights("fp8_tensor"), "fp8_tensor")
    assert fused_experts(packed, hidden, topk_weights, ids).isnan().all()


def test_static_scales_of_activations(weights, call):
    w, (hidden, topk_weights, ids) = weights("fp8_tensor"), call()
    w = dataclasses.replace(
        w,
        gate_up_input_scale=torch.tensor([0.004, 0.01, 0.002, 0.01], device=DEVICE),
        down_input_scale=torch.tensor([0.005], device=DEVICE),
    )
    packed = packed_for(w, "fp8_static")
    want = FusedExperts(w, backend="torch_reference")(hidden, topk_weights, ids)
    got = fused_experts(packed, hidden, topk_weights, ids)
    check(got, want, "fp8_static")
    dynamic = fused_experts(packed_for(w, "fp8_token"), hidden, topk_weights, ids)
    assert not torch.equal(got, dynamic)
    exact = fused_experts(packed_for(w, "none"), hidden, topk_weights, ids)
    assert not torch.equal(got, exact)

    routing = route(topk_weights, ids, experts=4)
    x = quantize_activations(hidden, "fp8_static", static_scale=w.static_scale("gate_up"))
    tokens, places = lay_out(x, routing, experts=4, capacity=9)
    codes = tokens.qdata.view(torch.uint8)
    rows = batched_experts(packed.kernel_weights, codes, tokens.scale, tokens.counts)
    # bfloat16 rows, truncated by the interpreter.
    batched = finalize_batched(rows, routing, places)
    assert (batched - want).norm() <= 2.0**-7 * want.norm()
