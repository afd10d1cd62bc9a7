"""The recipes that come with moequant, by the releases after which they are named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moequant import convert, verify
from moequant.errors import RecipeError
from moequant.storage.checkpoint import Checkpoint

KEPT = ("mlp.gate", "lm_head", "embed_tokens", "eh_proj", "shared_head.head")
"""What the FP8 releases of DeepSeek-V3 and Qwen3-MoE leave as it is, of matrices."""


SHAPES = {
    "q_a_proj": (128, 256),
    "q_b_proj": (512, 128),
    "kv_a_proj_with_mqa": (576, 256),
    "kv_b_proj": (512, 512),
}
"""Latent attention with the rows of DeepSeek-V3 where they fill no block of 128."""


@pytest.fixture
def deepseek(make_checkpoint, tmp_path):
    """A DeepSeek-V3 with these matrices, which `make_checkpoint` has smaller."""
    source = make_checkpoint(tmp_path / "source", model_type="deepseek_v3")
    tensors = {}
    for file in source.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        file.unlink()
    for name in [name for name in tensors if name.endswith("self_attn.q_proj.weight")]:
        del tensors[name]
        for leaf, shape in SHAPES.items():
            tensors[name.replace("q_proj", leaf)] = torch.randn(shape, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors")
    return source


def matrices(folder):
    """Dtype by module of every two-dimensional weight."""
    found = {}
    for name, info in Checkpoint.open(folder).tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2:
            found[name.removesuffix(".weight")] = info.dtype
    return found


@pytest.mark.parametrize("recipe", ["qwen3-fp8", "deepseek-v3-fp8", "fp8-block-all"])
def test_fp8_as_released_is_every_linear_layer_but_routers_and_heads(
    make_checkpoint, deepseek, tmp_path, recipe
):
    """Also `kv_a_proj_with_mqa` of 576 rows, 4.5 blocks, which engines merge behind `q_a_proj`."""
    sources = {"qwen3-fp8": [make_checkpoint()], "deepseek-v3-fp8": [deepseek]}
    for number, source in enumerate(sources.get(recipe, [make_checkpoint(), deepseek])):
        out = tmp_path / f"out{number}"
        result = convert(source, out, recipe=recipe)
        assert not result.plan.refusals
        for module, dtype in matrices(out).items():
            assert dtype == ("BF16" if module.endswith(KEPT) else "F8_E4M3"), module
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        assert config["weight_block_size"] == [128, 128]
        converted = {m for m, dtype in matrices(out).items() if dtype != "BF16"}
        assert converted.isdisjoint(config["modules_to_not_convert"])
        assert verify(out, against=source, layers=1).ok


def test_scales_of_merged_latent_attention_count_the_last_block(deepseek, tmp_path):
    convert(deepseek, tmp_path / "out", recipe="deepseek-v3-fp8")
    shapes = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    at = "model.layers.1.self_attn.{}.weight_scale_inv"
    assert shapes[at.format("q_a_proj")] == [1, 2]
    assert shapes[at.format("kv_a_proj_with_mqa")] == [5, 2]


def test_what_is_not_fp8_in_the_source_stays_as_it_is_beside_experts(deepseek, tmp_path):
    convert(deepseek, tmp_path / "out", recipe="deepseek-v3-nvfp4-experts")
    before, after = matrices(deepseek), matrices(tmp_path / "out")
    # NVFP4 has no tensor called weight.
    assert after == {m: dtype for m, dtype in before.items() if ".mlp.experts." not in m}


@pytest.mark.parametrize("recipe", ["deepseek-v3-fp8", "deepseek-v3-nvfp4-experts"])
def test_a_recipe_of_one_model_is_refused_for_another(make_checkpoint, tmp_path, recipe):
    with pytest.raises(RecipeError, match=r"deepseek.*qwen3_moe"):
        convert(make_checkpoint(), tmp_path / "out", recipe=recipe)


def test_a_recipe_name_that_is_none_is_answered_with_the_nearest(make_checkpoint, tmp_path):
    with pytest.raises(RecipeError, match=r"Did you mean deepseek-v3-fp8\?"):
        convert(make_checkpoint(), tmp_path / "out", recipe="deepseek_v3_fp8")
