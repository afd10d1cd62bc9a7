"""Humming beside ours, with a module in its place that evaluates what the calls say.

The module takes the arguments of humming-kernels 0.1.19 and the meaning that its sources give them;
the package itself needs a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.benchmarks import humming as module
from moequant.benchmarks.contenders import make_contender, takes_absent_ids
from moequant.benchmarks.experts import calc_diff
from moequant.benchmarks.layers import random_experts, random_inputs
from moequant.benchmarks.shapes import LayerShape
from moequant.errors import UnsupportedError
from moequant.formats.elements import decode_e2m1
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.activations import quantize_activations

interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton kernels are compiled here")
CPU = torch.device("cpu")
SHAPE = LayerShape(experts=6, hidden=256, intermediate=128, topk=2)


class HummingLayer(torch.nn.Module):
    """Decodes what it is given, and multiplies the rows of each expert."""

    def __init__(
        self, *, shape_n, shape_k, weight_config, input_config, pad_n_to_multiple,
        pad_k_to_multiple, num_experts, has_bias, torch_dtype,
    ):  # fmt: skip
        super().__init__()
        assert (pad_n_to_multiple, pad_k_to_multiple, torch_dtype) == (256, 128, torch.bfloat16)
        self.config, self.quantizes = weight_config, input_config["dtype"] == "float8e4m3"
        scale = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn}
        sizes = {
            "weight": ((shape_n, shape_k // 8), torch.int32),
            "weight_scale": (
                (shape_n, shape_k // weight_config["group_size"]),
                scale.get(weight_config.get("scale_dtype"), torch.bfloat16),
            ),
        }
        if weight_config.get("scale_2_type") == "tensor":
            sizes["weight_scale_2"] = ((), torch.float32)
        if has_bias:
            sizes["bias"] = ((shape_n,), torch.bfloat16)
        for name, (size, dtype) in sizes.items():
            tensor = torch.empty((num_experts, *size), dtype=dtype)
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        self.humming_config = None

    def load_from_tensors(self, tensors):
        self.load_state_dict(tensors, strict=False)

    def transform(self):
        nibbles = self.weight[..., None] >> torch.arange(0, 32, 4) & 0xF
        codes = nibbles.flatten(-2)
        w = codes.float() - 8 if "int" in self.config["dtype"] else decode_e2m1(codes.byte())
        w = w * self.weight_scale.float().repeat_interleave(self.config["group_size"], -1)
        if hasattr(self, "weight_scale_2"):
            w = w * self.weight_scale_2[:, None, None]
        self.decoded = w
        self.humming_config = SimpleNamespace(quantizes=self.quantizes)

    def forward(self, inputs, *, input_scale=None, expert_layout=None, compute_config=None):
        assert compute_config == '{"gemm_type": "grouped_contiguous"}'
        assert expert_layout.shape == (len(self.decoded) + 1,)
        assert expert_layout[0] == 0
        assert (input_scale is None) != self.quantizes
        x = inputs.float() if input_scale is None else inputs.float() * input_scale
        out = torch.full((len(x), self.decoded.shape[1]), torch.nan)
        for e, (first, end) in enumerate(pairwise(expert_layout)):
            out[first:end] = x[first:end] @ self.decoded[e].T
            if hasattr(self, "bias"):
                out[first:end] += self.bias[e]
        return out.bfloat16()


def may_process_input(
    config, inputs, *, layout="normal", scatter_idx=None, activation_type="none",
    activation_impl=None,
):  # fmt: skip
    x = inputs.float()
    if activation_type != "none":
        assert activation_type == "binary_split"
        python = re.sub(r"(?<=\d)f\b", "", activation_impl)
        a, b = x.chunk(2, 1)
        names = {"a": a, "b": b, "expf": torch.exp, "fminf": fminf, "fmaxf": fmaxf}
        x = eval(python, names)  # noqa: S307 - an expression of ours
    scale = None
    if config.quantizes:
        q = quantize_activations(x, "fp8_token")
        x, scale = q.qdata, q.scale
    if layout == "scatter":
        assert scatter_idx.shape[0] == len(inputs)
        target = scatter_idx.flatten()
        source = torch.arange(len(target)) // scatter_idx.shape[1]
        x, scale = (None if t is None else scattered(t, source, target) for t in (x, scale))
    return (x if config.quantizes else x.bfloat16()), None, scale


def scattered(rows, source, target):
    out = torch.full((len(target), rows.shape[1]), torch.nan).to(rows.dtype)
    out[target[target >= 0]] = rows[source[target >= 0]]
    return out


def fminf(x, y):
    return x.clamp(max=y)


def fmaxf(x, y):
    return x.clamp(min=y)


@pytest.fixture
def installed(monkeypatch):
    layer, forward = ModuleType("humming.layer"), ModuleType("humming.forward")
    layer.HummingLayer, forward.may_process_input = HummingLayer, may_process_input
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", layer)
    monkeypatch.setitem(sys.modules, "humming.forward", forward)
    monkeypatch.setattr(module, "version", lambda package: "0.1.19")


@interpreted
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("routing", ["uniform", "one-expert"])
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI], ids=str)
@pytest.mark.parametrize(
    ("format", "activations"),
    [("w4a8", "format"), ("mxfp4", "fp8_token"), ("mxfp4", "format"), ("nvfp4", "format")],
)
def test_its_calls_compute_what_the_experts_do(format, activations, act_fn, routing):
    shape = dataclasses.replace(SHAPE, act_fn=act_fn, biased=act_fn == SWIGLUOAI)
    weights = random_experts(shape, format, CPU)
    experts = make_contender("humming", weights, activations=activations)
    assert takes_absent_ids("humming")
    for seed in (0, 1):  # the second call finds what the first left
        call = random_inputs(shape, 9, CPU, seed, routing=routing, busiest=4).arguments
        want = FusedExperts(weights, activations=activations)(*call)
        # As ours: five roundings to bfloat16 (gate, up and an expert's result, biases too), of
        # 2**-9 / sqrt(3) each, and the codes that the first of them flips between the GEMMs,
        # which tests/runtime/test_sm90.py bounds.
        assert calc_diff(experts(*call), want) <= 1e-3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("format", "activations", "act_fn", "reason"),
    [
        ("fp8_block", "format", SILU, "not with fp8_block and fp8_group128"),
        ("nvfp4", "fp8_token", SILU, "not with nvfp4 and fp8_token"),
        ("w4a8", "none", SILU, "not with w4a8 and none"),
        ("mxfp4", "none", RELU2, "gated silu and swigluoai, not relu2"),
    ],
)
def test_what_it_is_not_timed_with_is_refused(format, activations, act_fn, reason):
    weights = random_experts(SHAPE, format, CPU)
    if not act_fn.gated:
        weights = ExpertWeights(gate=None, up=weights.up, down=weights.down, act_fn=act_fn)
    with pytest.raises(UnsupportedError, match=reason):
        make_contender("humming", weights, activations=activations)


@pytest.mark.usefixtures("installed")
def test_a_check_of_its_own_that_fails_is_a_refusal(monkeypatch):
    def transform(self):
        raise AssertionError("padded_shape_n % 64 == 0")

    monkeypatch.setattr(HummingLayer, "transform", transform)
    with pytest.raises(UnsupportedError, match=r"does not pack these weights: .*shape_n % 64"):
        make_contender("humming", random_experts(SHAPE, "w4a8", CPU))


@pytest.mark.usefixtures("installed")
def test_more_pairs_than_the_sort_takes_are_refused():
    experts = make_contender("humming", random_experts(SHAPE, "w4a8", CPU))
    call = random_inputs(SHAPE, 32769, CPU, 0).arguments
    with pytest.raises(UnsupportedError, match="at most 65536 token-expert pairs, not 65538"):
        experts(*call)


def test_it_is_refused_where_it_is_not_installed_or_another(monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    weights = random_experts(SHAPE, "w4a8", CPU)
    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(UnsupportedError, match=r"pip install humming-kernels==0\.1\.19"):
        make_contender("humming", weights)
    monkeypatch.setattr(module, "version", lambda package: "0.2.0")
    with pytest.raises(UnsupportedError, match=r"humming-kernels 0\.2\.0 is installed"):
        make_contender("humming", weights)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of SM90",
)
@pytest.mark.parametrize(
    ("format", "activations"),
    [("w4a8", "format"), ("mxfp4", "fp8_token"), ("mxfp4", "format"), ("nvfp4", "format")],
)
def test_the_package_computes_what_the_experts_do(format, activations):
    humming = pytest.importorskip("humming.layer")
    assert "expert_layout" in inspect.signature(humming.HummingLayer.forward).parameters
    device = torch.device("cuda", 0)
    shape = dataclasses.replace(SHAPE, hidden=1024, intermediate=512)
    weights = random_experts(shape, format, device)
    experts = make_contender("humming", weights, activations=activations)
    for tokens in (1, 40, 600):
        call = random_inputs(shape, tokens, device, 0).arguments
        want = FusedExperts(weights, backend="torch_reference", activations=activations)(*call)
        assert calc_diff(experts(*call), want) <= 1e-3
