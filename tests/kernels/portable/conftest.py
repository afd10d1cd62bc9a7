"""Small experts in every format that the portable kernels decode, and calls of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import SILU
from moequant.formats import get_format
from moequant.kernels.launch import INTERPRETED
from moequant.runtime import ExpertWeights

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# Scales that are not powers of two, so that code * scale rounds in float32, for formats that have
# such an option.
OPTIONS = {"fp8_block": {"scale": "float32"}, "nvfp4": {"global_scale": "exact"}}


def make_weights(format, E=4, H=256, I=128, act_fn=SILU, biases=False):
    g = torch.Generator().manual_seed(0)
    shapes = {"up": (E, I, H), "down": (E, H, I)}
    if act_fn.gated:
        shapes = {"gate": (E, I, H), **shapes}
    fmt = get_format(format)
    parts = {}
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=g) * shape[2] ** -0.5
        parts[name] = fmt.quantize(w, OPTIONS.get(format)).to(DEVICE)
        if biases:
            parts[f"{name}_bias"] = torch.randn(shape[:2], generator=g).to(DEVICE)
    return ExpertWeights(**{"gate": None, **parts}, act_fn=act_fn)


def make_call(E=4, H=256, M=9, T=2, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(M, H, generator=g).to(dtype)
    weights, ids = torch.rand(M, E, generator=g).topk(T)
    ids[0, 0] = -1
    return tuple(t.to(DEVICE) for t in (hidden, weights / weights.sum(1, keepdim=True), ids))


@pytest.fixture
def weights():
    return make_weights


@pytest.fixture
def call():
    return make_call
