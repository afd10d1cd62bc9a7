"""The formats that experts run in and nothing is converted to."""

from __future__ import annotations

import pytest
import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import REGISTRY, QuantizedWeight, check_parts, dequantize, get_format
from moequant.runtime import ExpertWeights, FusedExperts

UNQUANTIZED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(("format", "dtype"), UNQUANTIZED.items())
def test_weights_that_are_not_quantized_are_kept_as_they_are(format, dtype):
    w = torch.randn(3, 20, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = get_format(format).quantize(w)
    assert q.qdata.dtype == dtype
    assert torch.equal(q.qdata, w)
    assert torch.equal(dequantize(q), w.float())
    assert get_format(format).activations == "none"
    check_parts(q.tensors(), format, w.shape, "w")


def test_a_weight_beyond_float16_is_refused_and_not_made_infinite():
    w = torch.zeros(2, 2)
    w[1, 0] = -70000
    with pytest.raises(
        UnsupportedError, match=r"70000 exceeds the largest torch.float16, 65504; use bf16"
    ):
        get_format("fp16").quantize(w)


def test_weights_of_another_dtype_are_refused_by_name():
    parts = {"qdata": torch.zeros(2, 4, 4).half(), "scale": torch.ones(2, 1, 1)}
    with pytest.raises(CheckpointError, match=r"w\.qdata is float16"):
        check_parts(parts, "fp32", (2, 4, 4), "w")


@pytest.mark.parametrize(("format", "dtype"), UNQUANTIZED.items())
def test_experts_run_on_the_very_weights(layers, format, dtype):
    layer = layers.make()

    def plain(w):
        scale = torch.ones(*w.shape[:-2], 1, 1)
        w = w.to(dtype)
        return QuantizedWeight(
            format=format, qdata=w, scale=scale, global_scale=None, shape=w.shape
        )

    weights = ExpertWeights(**{name: plain(w) for name, w in layer.source.items()})
    got = FusedExperts(weights)(*layer.call).double()
    want = torch.zeros(layer.hidden.shape, dtype=torch.float64)
    source = {name: w.to(dtype).double() for name, w in layer.source.items()}
    for m, x in enumerate(layer.hidden.double()):
        for e, weight in zip(layer.ids[m].tolist(), layer.topk_weights[m], strict=True):
            gate, up = source["gate"][e] @ x, source["up"][e] @ x
            want[m] += weight * (source["down"][e] @ (gate / (1 + torch.exp(-gate)) * up))
    # As in test_act_fn_and_biases.py.
    assert (got - want).norm() < 1e-5 * want.norm()


def test_every_one_says_what_it_is():
    assert {name: f.name for name, f in REGISTRY.items()} == {n: n for n in REGISTRY}
    assert len({f.summary for f in REGISTRY.values()}) == len(REGISTRY)
