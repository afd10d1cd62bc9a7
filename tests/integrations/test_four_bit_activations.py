"""Whole models whose config.json says that activations are FP4 too."""

from __future__ import annotations

import json

import pytest
import torch

from moequant.conversion import convert
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.integrations.expert_modules import expert_blocks
from moequant.integrations.transformers import load_model, replace_experts
from moequant.preparation import prepare
from moequant.runtime import load_experts
from moequant.weights.converted import ConvertedCheckpoint

SCALE = 2.0**-7
RECIPE = """\
schema_version = 1
[[rules]]
roles = ["routed_experts", "shared_experts"]
format = "nvfp4"
activation_scales = 0.0078125
"""
MXFP4_INPUT = {
    "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    "dynamic": True, "scale_dtype": "torch.uint8",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["compressed-tensors", "modelopt", "mxfp4"])
def four_bit(request, sources, tmp_path_factory):
    """A checkpoint, and the scheme that its config.json says."""
    out = tmp_path_factory.mktemp("four-bit") / "out"
    if request.param != "mxfp4":
        options = {"dialect": request.param, "activation_scales": SCALE}
        return convert(sources("qwen3_moe"), out, format="nvfp4", **options).output, "nvfp4_static"
    path = convert(sources("qwen3_moe"), out, format="mxfp4").output
    config = json.loads((path / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = MXFP4_INPUT
    (path / "config.json").write_text(json.dumps(config))
    return path, "mxfp4"


def schemes(model):
    return {b.experts.fused.packed().workload.activations for b in expert_blocks(model).values()}


def test_their_experts_quantize_activations_unless_told_not_to(four_bit, prompt):
    path, scheme = four_bit
    model = load_model(path, dtype=torch.float32)
    assert schemes(model) == {scheme}
    got = model(prompt).logits
    weight_only = load_model(path, dtype=torch.float32, activations="none")
    assert schemes(weight_only) == {"none"}
    # FP4 is off by about a tenth of what it rounds.
    assert (got - weight_only(prompt).logits).norm() > 0.01 * got.norm()
    for layer, block in expert_blocks(weight_only).items():
        block.experts.fused = load_experts(path, layer)
    assert torch.equal(weight_only(prompt).logits, got)


def test_prepared_for_sm100_they_give_the_same_logits(four_bit, prompt):
    path, _ = four_bit
    folder = prepare(path, target="sm100").folder
    want, got = (load_model(p, dtype=torch.float32)(prompt).logits for p in (path, folder))
    assert torch.equal(got, want)


def test_they_replace_the_experts_of_a_model(four_bit, prompt):
    path, scheme = four_bit
    model = load_model(path, dtype=torch.float32)
    want = model(prompt).logits
    other = load_model(path, dtype=torch.float32, activations="none")
    replace_experts(other, path)
    assert schemes(other) == {scheme}
    assert torch.equal(other(prompt).logits, want)


def test_they_generate(four_bit, prompt):
    model = load_model(four_bit[0])
    ids = model.generate(prompt[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert ids.shape == (1, prompt.shape[1] + 3)


def test_a_backend_that_cannot_is_refused_with_what_would_run(four_bit):
    path, scheme = four_bit
    said = (
        rf"'naive_batched' does not run .*{scheme}.*torch_reference would run it\nactivations=\"no"
    )
    with pytest.raises(UnsupportedError, match=said):
        load_model(path, backend="naive_batched")


def test_other_weights_with_such_activations_are_dequantized(sources, tmp_path, caplog):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    path = convert(sources("deepseek_v3"), tmp_path / "out", recipe=recipe).output
    converted = ConvertedCheckpoint.open(path, quantized_activations=True)
    module = "model.layers.1.mlp.shared_experts.down_proj"
    assert converted.activations_of(module) == "nvfp4_static"
    model = load_model(path, dtype=torch.float32)
    loaded = model.get_submodule(module).weight
    assert torch.equal(loaded, dequantize(converted.read(module)))
    assert schemes(model) == {"nvfp4_static"}
    assert "input_global_scale" not in caplog.text  # transformers names what it has no place for
