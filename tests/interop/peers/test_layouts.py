"""What llm-compressor and Model-Optimizer write, by the layouts that make_layouts.py recorded.

The values are made up here; names, dtypes, shapes and config.json are theirs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moequant.compatibility import check_checkpoint
from moequant.conversion import Recipe, convert
from moequant.formats import dequantize
from moequant.runtime import load_experts
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.headers import DTYPES
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

RECORDED = json.loads(Path(__file__).with_name("layouts.json").read_text())
READ = {
    # Output: formats of experts and attention, and whether transformers, vLLM and SGLang load it.
    "llm-compressor NVFP4": ("nvfp4", "nvfp4", False, True, True),
    "llm-compressor NVFP4A16": ("nvfp4", "nvfp4", False, True, True),
    "llm-compressor FP8": ("fp8_tensor", "fp8_tensor", True, True, True),
    "llm-compressor FP8_DYNAMIC": ("fp8_channel", "fp8_channel", True, True, True),
    "llm-compressor FP8_BLOCK": ("fp8_block", "fp8_block", False, True, True),
    "llm-compressor MXFP4A16": ("mxfp4", "mxfp4", True, True, False),
    "llm-compressor MXFP4": ("mxfp4", "mxfp4", True, True, False),
    "llm-compressor MXFP8": ("mxfp8", "mxfp8", False, True, False),
    "llm-compressor W4A16": ("int4", "int4", True, True, True),
    "llm-compressor W4AFP8": ("int4", "int4", False, False, False),
    "llm-compressor mixed": ("nvfp4", "fp8_channel", False, True, True),
    "model_free_ptq FP8_BLOCK": ("fp8_block", "fp8_block", False, True, True),
    "model_free_ptq NVFP4A16": ("nvfp4", "nvfp4", False, False, False),
    "model_free_ptq MXFP4A16": ("mxfp4", "mxfp4", True, True, False),
    "Model-Optimizer FP8_DEFAULT_CFG": ("fp8_tensor", "fp8_tensor", False, True, True),
    "Model-Optimizer FP8_PER_CHANNEL_PER_TOKEN_CFG": (
        "fp8_channel", "fp8_channel", False, False, False,
    ),
    "Model-Optimizer FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": (
        "fp8_block", "fp8_block", False, False, False,
    ),
    "Model-Optimizer NVFP4_DEFAULT_CFG": ("nvfp4", "nvfp4", False, True, True),
    "Model-Optimizer W4A16_NVFP4_CFG": ("nvfp4", "nvfp4", False, True, True),
    "Model-Optimizer MXFP8_DEFAULT_CFG": ("mxfp8", "mxfp8", False, True, True),
    "Model-Optimizer mixed": ("nvfp4", "fp8_tensor", False, True, True),
}  # fmt: skip
APART = "model_free_ptq NVFP4A16"
"""Gives gate and up of an expert different global scales."""


def test_every_recorded_output_is_tested():
    assert RECORDED["outputs"].keys() == READ.keys()


def made_up(name, dtype, shape, generator, *, apart):
    """Codes of all kinds, and scales that are powers of two."""
    leaf = name.rpartition(".")[2]
    stored = DTYPES[dtype]
    if leaf == "weight_shape":
        N, K = (int(x) for x in shape_of_weight(name))
        return torch.tensor([N, K], dtype=stored)
    if "scale" in leaf:
        differs = apart and name.endswith("up_proj.weight_global_scale")
        one = 127 if dtype == "U8" else 2.0 if differs else 1.0
        return torch.full(shape, one).to(stored)
    if stored == torch.int8:  # INT4 codes, one in a byte
        return torch.randint(-8, 8, shape, generator=generator).to(stored)
    if stored in (torch.uint8, torch.int32):
        rows = torch.randint(0, 255, (*shape, stored.itemsize), generator=generator)
        return rows.to(torch.uint8).view(stored).reshape(shape)
    return (torch.randn(shape, generator=generator) * 4).to(stored)


def shape_of_weight(name):
    hidden, intermediate = (RECORDED["config"][k] for k in ("hidden_size", "moe_intermediate_size"))
    heads, groups = 8 * 32, 4 * 32
    rows = {"q": heads, "k": groups, "v": groups, "o": hidden, "down": hidden}
    leaf = name.split(".")[-2].removesuffix("_proj")
    columns = {"o": heads, "down": intermediate}
    return rows.get(leaf, intermediate), columns.get(leaf, hidden)


def write(output, path):
    layout = RECORDED["outputs"][output]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: made_up(name, *spec, generator, apart=output == APART)
        for name, spec in layout["tensors"].items()
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = RECORDED["config"] | {"quantization_config": layout["quantization_config"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("output", "wanted"), READ.items(), ids=READ)
def test_check_reads_it_and_says_which_engines_load_it(tmp_path, output, wanted):
    report = check_checkpoint(Checkpoint.open(write(output, tmp_path / "theirs")))
    facts, defects = report.examined.facts, report.examined.facts.defects
    experts, attention, *engines = wanted
    assert facts.experts == (experts,)
    assert facts.formats | {experts} == {experts, attention}
    assert [engine.loads for engine in report.engines[:3]] == engines
    known = {"gate-up-global-scales"} if output == APART else set()
    known |= {"row-scales"} if "PER_CHANNEL" in output else set()
    known |= {"unpacked-codes"} if "W4AFP8" in output else set()
    known |= {"blocks-alone"} if "BLOCKWISE" in output else set()
    assert {defect.id for defect in defects} == known


@pytest.mark.parametrize("output", READ)
def test_it_is_converted_with_every_weight_accounted_for(tmp_path, output):
    source = write(output, tmp_path / "theirs")
    convert(source, tmp_path / "ours", format="fp8_channel")
    assert verify(tmp_path / "ours", against=source).ok
    converted = ConvertedCheckpoint.open(tmp_path / "ours")
    for projection in ("gate", "up", "down"):
        q = converted.read(f"model.layers.0.mlp.experts.1.{projection}_proj")
        assert q.format == "fp8_channel"
        assert dequantize(q).isfinite().all()


def test_fp8_attention_beside_nvfp4_is_written_as_model_optimizer_writes_it(
    make_checkpoint, tmp_path
):
    """They list no kept modules here, and no merged layers, which some engines look up."""
    scale = {"activation_scales": 0.5}
    rules = [
        {"roles": ["routed_experts"], "format": "nvfp4", **scale},
        {"roles": ["attention"], "format": "fp8_tensor", **scale},
    ]
    recipe = Recipe.model_validate({"rules": rules, "output": {"dialect": "modelopt"}})
    source = make_checkpoint(experts=2, layers=1, hidden=256, intermediate=128)
    out = convert(source, tmp_path / "out", recipe=recipe).output
    assert verify(out, against=source).ok
    theirs = RECORDED["outputs"]["Model-Optimizer mixed"]
    ours = json.loads((out / "config.json").read_text())["quantization_config"]
    said = theirs["quantization_config"]
    assert said.keys() - ours.keys() == {"producer"}
    same = ours.keys() - {"ignore", "quantized_layers"}
    assert {key: ours[key] for key in same} == {key: said[key] for key in same}
    merged = {"model.layers.0.self_attn.qkv_proj": {"quant_algo": "FP8"}}
    assert ours["quantized_layers"] == said["quantized_layers"] | merged
    checkpoint = Checkpoint.open(out)
    quantized = "weight_scale", "weight_scale_2", "input_scale"
    for tensors in (theirs["tensors"], dict.fromkeys(checkpoint.tensors)):
        assert sum(n.endswith(quantized) for n in tensors) == 6 * 3 + 4 * 2
    for name, (dtype, shape) in theirs["tensors"].items():
        if name.endswith((*quantized, "_proj.weight")):
            written = checkpoint.tensors[name]
            # Attention of the made checkpoint may have other sizes.
            assert written.dtype == dtype, name
            assert len(written.shape) == len(shape), name
            assert ".experts." not in name or [*written.shape] == shape, name
    loaded = {e.key: e.loads for e in check_checkpoint(checkpoint).engines}
    assert loaded == {"transformers": False, "vllm": True, "sglang": True, "moequant": True}


def test_fp8_with_activation_scales_is_written_as_model_optimizer_writes_it(
    make_checkpoint, tmp_path
):
    """Of experts alone; theirs quantizes attention too."""
    rule = {"roles": ["routed_experts"], "format": "fp8_tensor", "activation_scales": 0.5}
    recipe = Recipe.model_validate({"rules": [rule], "output": {"dialect": "modelopt"}})
    source = make_checkpoint(experts=2, layers=1, hidden=256, intermediate=128)
    out = convert(source, tmp_path / "out", recipe=recipe).output
    assert verify(out, against=source).ok
    theirs = RECORDED["outputs"]["Model-Optimizer FP8_DEFAULT_CFG"]
    ours = json.loads((out / "config.json").read_text())["quantization_config"]
    said = theirs["quantization_config"]
    assert said.keys() - ours.keys() == {"producer"}
    assert all(ours[key] == said[key] for key in ours.keys() - {"ignore"})
    assert {*said["ignore"]} - {*ours["ignore"]} == set()

    checkpoint = Checkpoint.open(out)
    of_experts = {n: s for n, s in theirs["tensors"].items() if ".experts." in n}
    written = {n: [i.dtype, [*i.shape]] for n, i in checkpoint.tensors.items() if ".experts." in n}
    assert written == of_experts
    loaded = {e.key: e.loads for e in check_checkpoint(checkpoint).engines}
    assert loaded == {"transformers": False, "vllm": True, "sglang": True, "moequant": True}
    assert load_experts(out, 0).packed().workload.activations == "fp8_static"
