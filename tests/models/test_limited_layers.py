"""Step-3.5 and 3.7: the last layers clamp what the function gives, as transformers does."""

from __future__ import annotations

import pytest
import torch
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from moequant.conversion import convert
from moequant.formats import dequantize
from moequant.runtime import load_experts
from moequant.weights.converted import ConvertedCheckpoint


def their_experts(case, converted, layer):
    """transformers' module of a layer on our decoded weights, in float64."""
    limits = case.config.text_config.swiglu_limits
    experts = Step3p7Experts(case.config.text_config, swiglu_limit=limits[layer] or None).double()
    weights = {
        p: torch.stack(
            [dequantize(converted.read_expert(layer, e, p)) for e in range(converted.moe.experts)]
        ).double()
        for p in converted.moe.projections
    }
    experts.gate_up_proj.data = torch.cat([weights["gate"], weights["up"]], 1)
    experts.down_proj.data = weights["down"]
    return experts


@pytest.mark.parametrize("model_type", ["step3p5", "step3p7"])
def test_each_layer_computes_what_transformers_module_does(save, tmp_path, model_type):
    """But for float32 sums of 64 and 96 terms; without its clamp a layer is far off."""
    saved = save(model_type)
    out = convert(saved.checkpoint.path, tmp_path / "out", format="mxfp4").output
    converted = ConvertedCheckpoint.open(out)
    hidden = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(4).expand(32, 4)
    weights = torch.rand(32, 4, generator=torch.Generator().manual_seed(4))
    ours = load_experts(out, [1, 2])
    for layer, name in ((1, "silu"), (2, "swiglustep")):
        theirs = their_experts(saved.case, converted, layer)
        with torch.no_grad():
            wanted = theirs(hidden.double(), ids, weights.double())
            theirs.limit = float("inf")
            unclamped = theirs(hidden.double(), ids, weights.double())
        found = ours[layer](hidden, weights, ids).double()
        assert ours[layer].weights.act_fn.name == name
        assert (found - wanted).norm() < 2**-18 * wanted.norm()
        assert ((unclamped - wanted).norm() > 0.1 * wanted.norm()) == (name == "swiglustep")
