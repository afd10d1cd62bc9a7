"""Checkpoints that others write: FP4 activations with static scales, and MXFP8 of modelopt."""

from __future__ import annotations

import json

import pytest
import torch
from layer_call import call, run
from safetensors.torch import load_file, save_file

from moequant.errors import UnsupportedError
from moequant.runtime import load_experts

_BLOCK = "model.layers.{}.mlp.experts."
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_STATIC = {**_FP4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_MXFP4 = {**_FP4, "strategy": "group", "group_size": 32, "dynamic": True}


def rewritten(checkpoint, path, *, config, scale=None, without="-"):
    """A copy whose quantization_config `config` changes, without tensors called `without`.

    It gets input scales called `scale`, all different.
    """
    path.mkdir()
    document = json.loads((checkpoint / "config.json").read_text())
    config(document["quantization_config"])
    (path / "config.json").write_text(json.dumps(document))
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        found = load_file(file).items()
        tensors |= {name: tensor for name, tensor in found if not name.endswith(without)}
    modules = sorted({n.rpartition(".")[0] for n in tensors if ".mlp.experts." in n})
    for number, module in enumerate(modules if scale else ()):
        tensors[f"{module}.{scale}"] = torch.tensor(0.01 + number / 1000)
    save_file(tensors, path / "model.safetensors")
    return path


def group_of(config):
    return next(iter(config["config_groups"].values()))


def quantize_activations(config):
    of_fp8 = group_of(config)["weights"]["num_bits"] == 8
    group_of(config).update(input_activations=_FP8 if of_fp8 else _STATIC)
    if config["quant_method"] == "modelopt":
        config.update(quant_algo="NVFP4")


@pytest.fixture(
    params=[
        ("nvfp4", "compressed-tensors", "input_global_scale"),
        ("nvfp4", "modelopt", "input_scale"),
        ("fp8_tensor", "compressed-tensors", "input_scale"),
    ]
)
def static(request, converted, tmp_path):
    """A format with static scales of activations."""
    format, dialect, scale = request.param
    ours = converted(format, dialect)
    return rewritten(ours, tmp_path / "x", config=quantize_activations, scale=scale)


def test_static_scales_of_activations_are_used(engine, static):
    layer, expected = engine.loaded(static), load_experts(static, 0)
    experts = layer.quant_method.experts
    assert experts.packed().workload.activations in ("nvfp4_static", "fp8_static")
    found, wanted = experts.weights.input_scales(), expected.weights.input_scales()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    got = run(layer, *call())
    assert torch.equal(got, expected(*call()))


def test_a_static_scale_that_is_loaded_again_is_refused(engine, static):
    config = json.loads((static / "config.json").read_text())["quantization_config"]
    layer = engine.layer(config)
    load = next(p.weight_loader for name, p in layer.named_parameters() if "w13_input" in name)
    layer.quant_method.stored.free(layer)
    with pytest.raises(UnsupportedError, match="loaded again"):
        load(None, torch.zeros(()), "x.w13_input_scale", "w1", 0)


def test_numbers_of_a_benchmark_make_no_bad_static_scale(engine, static, fill_as_a_benchmark):
    config = json.loads((static / "config.json").read_text())["quantization_config"]
    layer = engine.layer(config, load_format="dummy")
    fill_as_a_benchmark(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert all((s == 1).all() for s in layer.quant_method.experts.weights.input_scales().values())


def test_static_scales_are_left_out_without_quantized_activations(engine, static):
    layer = engine.loaded(static, options={"activations": "none"})
    got = run(layer, *call())
    assert torch.equal(got, load_experts(static, 0, activations="none")(*call()))


def test_logical_shapes_may_be_missing(engine, converted, tmp_path):
    ours = converted("w4a8", "compressed-tensors")
    path = rewritten(ours, tmp_path / "x", config=dict, without="weight_shape")
    layer = engine.loaded(path)
    got = run(layer, *call())
    assert torch.equal(got, load_experts(ours, 0)(*call()))


def test_mxfp4_activations_are_those_of_config_json(engine, converted, tmp_path):
    path = rewritten(
        converted("mxfp4", "compressed-tensors"),
        tmp_path / "x",
        config=lambda c: group_of(c).update(input_activations=_MXFP4),
    )
    layer = engine.loaded(path)
    got = run(layer, *call())
    assert torch.equal(got, load_experts(path, 0)(*call()))
    assert not torch.equal(got, load_experts(path, 0, activations="none")(*call()))


def test_mxfp8_of_modelopt_has_activations_in_mxfp8(engine, converted, tmp_path):
    """Its tensors are those of compressed-tensors' weight-only MXFP8, in the same names."""

    def config(c):
        c.clear()
        c.update(quant_method="modelopt", quant_algo="MXFP8", ignore=[])

    ours = converted("mxfp8", "compressed-tensors")
    path = rewritten(ours, tmp_path / "x", config=config)
    layer = engine.loaded(path)
    got = run(layer, *call())
    assert torch.equal(got, load_experts(ours, 0, activations="mxfp8")(*call()))
