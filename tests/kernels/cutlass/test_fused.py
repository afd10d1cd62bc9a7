"""What lies around the grouped GEMM: in the interpreter, around GEMMs that torch computes.

The GEMM's own kernel is tested in test_ptx.py, and all of it in
tests/runtime/test_hopper_libraries.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.benchmarks.experts import calc_diff
from moequant.formats import quantize
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.cuda_driver import TensorMap
from moequant.kernels.cutlass import grouped_gemm
from moequant.kernels.cutlass import sm90_fp8_channel_fused as fused
from moequant.kernels.cutlass.grouped_gemm import CutlassGroupedGemm
from moequant.kernels.cutlass.variant import TILE_ROWS, GemmVariant
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import REGISTRY
from moequant.runtime.batched import finalize_batched, prepare_batched
from moequant.runtime.call import run_experts
from moequant.runtime.packing import workload_of
from moequant.runtime.routing import route

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="tests/runtime/test_hopper_libraries.py has a GPU"
)

E, H, I, M, T = 4, 256, 144, 9, 2
FUNCTIONS = [SILU, SWIGLUOAI, SITU, RELU2, ActFn(name="gelu", gated=False, limit=0.5)]

# As derived in tests/runtime/test_hopper_libraries.py.
CALC_DIFF = 1e-3


class TorchGemm:
    """Stands for `CutlassGroupedGemm`: the same arguments, float32 sums."""

    def __init__(self, variant, *, w, w_scale, x, x_scale, bias, tiles, tile_count, out):
        assert w_scale.numel() == w.shape[0] * w.shape[1]
        assert w_scale.is_contiguous()
        assert (bias is not None) == variant.bias
        self.variant, self.out = variant, out
        self.bias = torch.zeros(w.shape[:2]) if bias is None else bias
        self.w = w.float() * w_scale.view(*w.shape[:2], 1)
        self.x, self.x_scale = x, x_scale
        self.tiles, self.tile_count = tiles, tile_count

    def __call__(self, stream):
        x = self.x.float() * self.x_scale[:, None]
        for expert, first, rows, _ in self.tiles[: self.tile_count.item()].tolist():
            assert 0 < rows <= self.variant.tile_rows
            at = slice(first, first + rows)
            self.out[at] = (x[at] @ self.w[expert].mT + self.bias[expert]).bfloat16()


@pytest.fixture(autouse=True)
def gemm(monkeypatch):
    monkeypatch.setattr(fused, "CutlassGroupedGemm", TorchGemm)
    monkeypatch.setattr(fused, "stream_of", lambda device: 0)


def weights_of(act_fn=SILU, biases=False):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del shapes["gate"]
    parts = {"gate": None}
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=g) * shape[2] ** -0.5
        parts[name] = quantize(w, "fp8_channel", scale="float32")
        if biases:
            parts[f"{name}_bias"] = torch.randn(shape[:2], generator=g)
    return ExpertWeights(**parts, act_fn=act_fn)


def call_of(dtype=torch.float32, seed=1):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, H, generator=g).to(dtype)
    topk_weights, ids = torch.rand(M, E, generator=g).topk(T)
    ids[0, 0] = -1
    return hidden, topk_weights, ids


def packed_by(name, weights, activations="format"):
    """As the backend packs them, which runs on GPUs alone."""
    backend = REGISTRY[name]
    return backend.load(backend.layout.pack(weights), workload_of(weights, activations))


def check(got, weights, call, **options):
    want = FusedExperts(weights, backend="torch_reference")(*call, **options)
    assert got.dtype == want.dtype
    assert bool(got.isfinite().all())
    assert calc_diff(got, want) <= CALC_DIFF


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", FUNCTIONS, ids=str)
def test_every_function_with_and_without_biases(act_fn, biases):
    weights, call = weights_of(act_fn, biases), call_of()
    check(run_experts(packed_by("cutlass_fp8", weights), *call), weights, call)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", FUNCTIONS, ids=str)
def test_batches_too(act_fn, biases):
    weights, (hidden, topk_weights, ids) = weights_of(act_fn, biases), call_of()
    routing = route(topk_weights, ids, experts=E)
    tokens, places = prepare_batched(hidden, routing, experts=E, capacity=M, scheme="fp8_token")
    rows = packed_by("cutlass_fp8_batched", weights).run_batches(tokens)
    check(finalize_batched(rows, routing, places), weights, (hidden, topk_weights, ids))


@pytest.mark.parametrize("act_fn", [SWIGLUOAI, RELU2], ids=str)
def test_one_scale_of_all_tokens_and_of_all_rows(act_fn):
    weights, call = weights_of(act_fn, biases=True), call_of(torch.bfloat16)
    call[2][3:5] = -1
    packed = packed_by("cutlass_fp8", weights, "fp8_tensor")
    # Bytes of the largest numbers, which would make the largest scales.
    memory = torch.full((packed.workspace_bytes(M, T),), 0x7F, dtype=torch.uint8)
    got = run_experts(packed, *call, workspace=memory)
    check(got, weights, call, activations="fp8_tensor")
    x = quantize_activations(call[0], "fp8_tensor")
    quantized = run_experts(packed, x.qdata, *call[1:], hidden_scale=x.scale, workspace=memory)
    assert torch.equal(quantized, got)
    assert not torch.equal(run_experts(packed_by("cutlass_fp8", weights), *call), got)


def test_one_scale_of_all_rows_in_batches():
    weights, (hidden, topk_weights, ids) = weights_of(SWIGLUOAI, biases=True), call_of()
    routing = route(topk_weights, ids, experts=E)
    tokens, places = prepare_batched(hidden, routing, experts=E, capacity=M, scheme="fp8_tensor")
    beyond = torch.arange(M)[None, :] >= tokens.counts[:, None]
    tokens.scale[beyond] = torch.nan
    rows = packed_by("cutlass_fp8_batched", weights, "fp8_tensor").run_batches(tokens)
    got = finalize_batched(rows, routing, places)
    check(got, weights, (hidden, topk_weights, ids), activations="fp8_tensor")


def test_the_ids_of_other_ranks():
    weights, (hidden, topk_weights, ids) = weights_of(), call_of()
    call = (hidden, topk_weights, ids + 3)
    here = torch.tensor([-1, -1, -1, 3, 2, -1, 0])
    got = run_experts(packed_by("cutlass_fp8", weights), *call, expert_map=here)
    check(got, weights, call, expert_map=here)


def test_hidden_states_that_come_quantized_give_the_same_bits():
    packed, (hidden, *routing) = packed_by("cutlass_fp8", weights_of()), call_of(torch.bfloat16)
    x = quantize_activations(hidden, "fp8_token")
    got = run_experts(packed, x.qdata, *routing, hidden_scale=x.scale)
    assert torch.equal(got, run_experts(packed, hidden, *routing))


@pytest.mark.parametrize("tile_rows", TILE_ROWS)
def test_nothing_is_read_before_it_is_written(tile_rows):
    weights, call = weights_of(biases=True), call_of()
    tensors = packed_by("cutlass_fp8", weights).tensors
    size, variant = WorkspaceArena(), GemmVariant(tile_rows=tile_rows)
    fused.CutlassPlan(tensors, SILU, M, T, size, variant=variant)
    arena = WorkspaceArena(torch.full((size.size_bytes,), 0xFF, dtype=torch.uint8))
    out = torch.full((M, H), torch.nan)
    fused.CutlassPlan(tensors, SILU, M, T, arena, variant=variant)(*call, out)
    check(out, weights, call)


@pytest.fixture
def encoded(monkeypatch):
    """What tensor maps are encoded of, where a GEMM is made and launched as on a GPU."""

    class Both(TorchGemm):
        def __init__(self, variant, **tensors):
            super().__init__(variant, **tensors)
            CutlassGroupedGemm(variant, **tensors)

    addresses = []

    def encode(tensor, box):
        addresses.append(tensor.data_ptr())
        return TensorMap()

    monkeypatch.setattr(fused, "CutlassGroupedGemm", Both)
    monkeypatch.setattr(grouped_gemm, "tensor_map", encode)
    monkeypatch.setattr(grouped_gemm, "Launch", lambda *arguments: None)
    monkeypatch.setattr(grouped_gemm, "_kernel", lambda variant, index: None)
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: sms)
    return addresses


def test_a_second_call_encodes_nothing_and_reads_its_own_hidden_states(encoded):
    weights = weights_of(biases=True)
    packed = packed_by("cutlass_fp8", weights)
    workspace = torch.empty(packed.workspace_bytes(M, T), dtype=torch.uint8)
    assert not encoded
    for seed in (1, 2, 3):
        call = call_of(seed=seed)
        check(run_experts(packed, *call, workspace=workspace), weights, call)
        assert len(encoded) == 4
    x = quantize_activations(call[0], "fp8_token")
    run_experts(packed, x.qdata, *call[1:], hidden_scale=x.scale, workspace=workspace)
    assert call[0].data_ptr() not in encoded
    assert x.qdata.data_ptr() not in encoded


def test_another_workspace_or_size_has_tensor_maps_of_its_own(encoded):
    weights, call = weights_of(), call_of()
    packed = packed_by("cutlass_fp8", weights)
    size = packed.workspace_bytes(M, T)
    one, other = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    for workspace in (one, other, one):
        check(run_experts(packed, *call, workspace=workspace), weights, call)
    assert len(encoded) == 8
    fewer = tuple(t[:3] for t in call)
    check(run_experts(packed, *fewer, workspace=one), weights, fewer)
    assert len(encoded) == 12
