"""Calls of the backend, with GEMMs that torch computes from the same buffers and weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SWIGLUOAI
from moequant.benchmarks.experts import calc_diff
from moequant.formats import quantize
from moequant.kernels import tensor_scale
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.sm90 import plan as sm90_plan
from moequant.kernels.sm90 import quantize_permute
from moequant.kernels.sm90 import weights as sm90_weights
from moequant.kernels.sm90.tiling import Tiling
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import Fp8ChannelWeights
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends.sm90_fp8_channel import Sm90Fp8Channel

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton kernels are compiled here")
E, H, I, T = 4, 96, 64, 2
NAME = "sm90_fp8_channel"
# What differs from the reference is the rounding to bfloat16 in front of the second quantization:
# see the derivation in tests/runtime/test_sm90.py.
CALC_DIFF = 1e-3


class Gemm:
    """What the kernel computes, for the tiles that the sort made."""

    def __init__(
        self, config, *, x, x_scale, routing, units_taken, out, experts, bias, act_fn, own
    ):
        self.config, self.x, self.x_scale, self.routing = config, x, x_scale, routing
        self.out, self.bias, self.act_fn = out, bias, act_fn
        self.weight, scale = own()
        per_matrix = (1 + config.gated) if config.per_matrix else config.w_rows
        self.scale = scale.repeat_interleave(config.w_rows // per_matrix, 1)

    def route(self, topk_ids, expert_map):
        pass

    def __call__(self, stream):
        for expert, row, rows, _ in self.routing.tiles[: int(self.routing.tile_count)].tolist():
            here = torch.arange(row, row + rows)
            of_x = here
            if self.config.gather:
                of_x = self.routing.pair_of_row[here].long() // self.config.gather
            x = self.x[of_x].float() * self.x_scale[of_x, None]
            y = x @ (self.weight[expert].float() * self.scale[expert]).T
            if self.bias is not None:
                y += self.bias[expert]
            if self.config.act is not None:
                gate, up = y.chunk(2, 1) if self.config.gated else (None, y)
                y = self.act_fn(gate, up)
            self.out[here] = y.bfloat16()


@pytest.fixture(autouse=True)
def sm90(monkeypatch):
    """A CPU passes for a GPU of SM90."""
    properties = SimpleNamespace(name="A GPU", multi_processor_count=132)
    monkeypatch.setattr(Sm90Fp8Channel, "supports", lambda self, workload: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sm90_plan, "stream_of", lambda device: 0)
    monkeypatch.setattr(sm90_weights, "GroupedGemm", Gemm)
    gemm = Fp8ChannelWeights.gemm

    def with_tensors(self, common, *arguments):
        config, _ = gemm(self, common, *arguments)
        first = config.act is not None
        tensors = (self.w13, self.w13_scale) if first else (self.w2, self.w2_scale)
        return config, lambda: tensors

    monkeypatch.setattr(Fp8ChannelWeights, "gemm", with_tensors)


def layer(format, act_fn=SWIGLUOAI, *, bias=False):
    g = torch.Generator().manual_seed(0)
    sizes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not act_fn.gated:
        del sizes["gate"]
    weights = {
        name: quantize(torch.randn(size, generator=g) * size[2] ** -0.5, format)
        for name, size in sizes.items()
    }
    biases = {
        f"{name}_bias": torch.randn(size[:2], generator=g) for name, size in sizes.items() if bias
    }
    return ExpertWeights(**{"gate": None, **weights, **biases}, act_fn=act_fn)


def inputs(tokens):
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :T].int()
    ids[0, 0] = -1
    hidden = torch.randn(tokens, H, generator=g).bfloat16()
    return hidden, torch.rand(tokens, T, generator=g), ids


def check(weights, tokens=9, tiling=None, monkeypatch=None, **options):
    if tiling is not None:
        monkeypatch.setattr(Fp8ChannelWeights, "tiling", lambda self, tokens, topk: tiling)
    call = inputs(tokens)
    got = FusedExperts(weights, backend=NAME, **options)(*call)
    want = FusedExperts(weights, backend="torch_reference", **options)(*call)
    assert calc_diff(got, want) <= CALC_DIFF
    return got


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act_fn", [SWIGLUOAI, RELU2], ids=str)
def test_a_call_computes_what_the_reference_does(format, act_fn, bias):
    check(layer(format, act_fn, bias=bias))


TILINGS = [Tiling(rows=8, split13=2), Tiling(rows=96, pair=True), Tiling(rows=48, gather=True)]
every_tiling = pytest.mark.parametrize("tiling", TILINGS, ids=["split", "pair", "gather"])


@every_tiling
@pytest.mark.parametrize("few", [False, True])
def test_it_does_with_every_way_to_prepare(monkeypatch, tiling, few):
    if not few:
        monkeypatch.setattr(quantize_permute, "FEW_PAIRS", {128: 0, 0: 0})
    check(layer("fp8_channel"), tiling=tiling, monkeypatch=monkeypatch)


@every_tiling
@pytest.mark.parametrize("scales", [1, E])
def test_static_scales_count_instead_of_those_of_tokens(monkeypatch, tiling, scales):
    weights = replace(
        layer("fp8_tensor"),
        gate_up_input_scale=torch.linspace(0.002, 0.004, scales),  # some values saturate
        down_input_scale=torch.linspace(0.01, 0.03, scales),
    )
    static = check(weights, tiling=tiling, monkeypatch=monkeypatch)
    by_token = check(weights, tiling=tiling, monkeypatch=monkeypatch, activations="fp8_token")
    assert calc_diff(static, by_token) > CALC_DIFF


@every_tiling
@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor"])
def test_one_scale_counts_for_all_tokens(monkeypatch, tiling, format):
    monkeypatch.setattr(tensor_scale, "_PROGRAMS", 4)  # fewer than tokens and rows
    weights = layer(format, bias=True)
    got = check(weights, tiling=tiling, monkeypatch=monkeypatch, activations="fp8_tensor")
    by_token = check(weights, tiling=tiling, monkeypatch=monkeypatch)
    assert not torch.equal(got, by_token)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_no_row_or_byte_that_no_expert_computes_makes_a_scale_larger(byte):
    weights = layer("fp8_tensor")
    module = FusedExperts(weights, backend=NAME, activations="fp8_tensor")
    hidden, topk_weights, ids = inputs(9)
    ids[2:5] = -1
    memory = torch.full((module.workspace_bytes(9, T),), byte, dtype=torch.uint8)
    got = module(hidden, topk_weights, ids, workspace=memory)
    want = FusedExperts(weights, activations="fp8_tensor")(hidden, topk_weights, ids)
    assert calc_diff(got, want) <= CALC_DIFF
    assert torch.equal(module(hidden, topk_weights, ids, workspace=memory), got)
    nowhere = torch.full_like(ids, -1)
    assert not module(hidden, topk_weights, nowhere, workspace=memory).any()
    assert module(hidden[:0], topk_weights[:0], ids[:0]).shape == (0, H)


def test_of_zeros_the_one_scale_is_one():
    _, topk_weights, ids = inputs(9)
    zeros = torch.zeros(9, H).bfloat16()
    module = FusedExperts(layer("fp8_tensor"), backend=NAME, activations="fp8_tensor")
    assert not module(zeros, topk_weights, ids).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_or_inf_in_a_token_makes_all_that_share_its_scale_nan(poison):
    hidden, topk_weights, ids = inputs(9)
    hidden[4, 7] = poison
    module = FusedExperts(layer("fp8_tensor"), backend=NAME, activations="fp8_tensor")
    assert module(hidden, topk_weights, ids).isnan().all()


@every_tiling
@pytest.mark.parametrize("scheme", ["fp8_token", "fp8_static", "fp8_tensor"])
def test_hidden_states_that_come_quantized_give_the_same_bits(monkeypatch, tiling, scheme):
    weights, scale = layer("fp8_tensor"), None
    if scheme == "fp8_static":
        scale = torch.tensor([0.005])
        weights = replace(weights, gate_up_input_scale=scale, down_input_scale=scale)
    activations = "fp8_tensor" if scheme == "fp8_tensor" else "format"
    want = check(weights, tiling=tiling, monkeypatch=monkeypatch, activations=activations)
    hidden, topk_weights, ids = inputs(9)
    x = quantize_activations(hidden, scheme, static_scale=scale)
    module = FusedExperts(weights, backend=NAME, activations=activations)
    assert torch.equal(module(x.qdata, topk_weights, ids, hidden_scale=x.scale), want)
