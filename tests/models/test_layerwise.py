"""Layer by layer, every model of transformers computes what the whole one computes."""

from __future__ import annotations

import pytest
import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.integrations.expert_inputs import ExpertInputs
from moequant.integrations.layerwise import LayerwiseModel
from moequant.weights.source_model import read_source, source_config

REFUSED = {
    "kimi_k2": (CheckpointError, "transformers .* cannot read it"),
    "deepseek_vl_v2": (CheckpointError, "transformers .* cannot read it"),
    "step3p5": (UnsupportedError, "neither a causal language model nor an image-text-to-text"),
    "qwen3_omni_moe": (UnsupportedError, "neither a causal language model nor"),
    "longcat_flash": (CheckpointError, "4 experts in the checkpoint, but 6 in transformers'"),
}
"""Models that transformers cannot build from the files of a release, and what is said."""

# Sums of float32 in another order: parameters that are merged, and views of them, lie elsewhere.
RELATIVE = 1e-5


def tensors_of(returned):
    several = returned if isinstance(returned, tuple) else (returned,)
    return [tensor for tensor in several if tensor is not None]


def layerwise(saved):
    checkpoint = saved.checkpoint
    source = read_source(checkpoint.tensors, source_config(checkpoint))
    cpu = torch.device("cpu")
    return LayerwiseModel(checkpoint, source, dtype=torch.float32, device=cpu)


def returned_by_layers(model, layers, ids):
    """What each layer of a whole model returns."""
    found = []
    hooks = [layer.register_forward_hook(lambda m, a, out: found.append(out)) for layer in layers]
    with torch.inference_mode():
        model.get_decoder()(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def test_layers_return_what_they_return_in_the_whole_model(saved):
    model_type = saved.checkpoint.config["model_type"]
    if model_type in REFUSED:
        error, message = REFUSED[model_type]
        with pytest.raises(error, match=message), layerwise(saved).layer(0):
            pass
        return
    model = layerwise(saved)
    moe = model.source.model.moe
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    whole = saved.model.get_decoder()
    whole = whole if hasattr(whole, "layers") or hasattr(whole, "blocks") else whole.model
    wanted = returned_by_layers(saved.model, getattr(whole, "layers", None) or whole.blocks, ids)
    with torch.inference_mode():
        wanted_logits = saved.model(input_ids=ids, use_cache=False).logits
    model.load_rest()
    with model.embedding():
        embedded = model.embed(ids)
    before = None
    for index, returned in enumerate(wanted):
        seen = {"hidden": [0] * moe.experts, "intermediate": [0] * moe.experts}
        channels = set()

        def observe(name, expert, rows, seen=seen, channels=channels):
            seen[name][expert] += len(rows)
            channels.add((name, rows.shape[1]))

        parameters = model.expert_parameters(index)
        with (
            model.layer(index) as layer,
            ExpertInputs(layer, parameters, experts=moe.experts, observe=observe),
        ):
            before = model.run(index, ids, embedded, before)
        for tensor, other in zip(tensors_of(before), tensors_of(returned), strict=True):
            error = (tensor.float() - other.float()).abs().max()
            assert error <= RELATIVE * other.float().abs().max(), index
        assert seen["hidden"] == seen["intermediate"], index
        sparse = index in moe.sparse_layers
        assert channels == (
            {("hidden", moe.hidden), ("intermediate", moe.intermediate)} if sparse else set()
        )
        assert all(parameter.is_meta for parameter in layer.parameters())
    with model.head():
        logits = model.logits(ids, before)
    assert (logits - wanted_logits).abs().max() <= RELATIVE * wanted_logits.abs().max()
    assert logits.shape == (2, 24, model.vocabulary)
    assert all(parameter.is_meta for parameter in model._head.parameters())
