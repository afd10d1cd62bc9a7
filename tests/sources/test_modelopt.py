"""Sources of Model-Optimizer: mixed formats, scales that are not of weights, what is refused."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli
from moequant.conversion import Recipe, convert
from moequant.dialects import get_dialect
from moequant.dialects.modelopt import _UNREAD as UNREAD
from moequant.errors import CheckpointError, UnsupportedError
from moequant.verification import verify

EXPERT = "model.layers.0.mlp.experts.1.up_proj"
ATTENTION = [f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"]
EXPERTS = [
    f"model.layers.0.mlp.experts.{e}.{n}_proj" for e in (0, 1) for n in ("gate", "up", "down")
]
LAYERS = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in EXPERTS}
LAYERS |= {module: {"quant_algo": "FP8"} for module in ATTENTION}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "quantized_layers": LAYERS,
    "ignore": [],
}


@pytest.fixture
def mixed(make_checkpoint, write_source, by_hand, edit, tmp_path):
    """Experts in NVFP4, attention in FP8 with one scale, and scales of the KV cache."""
    plain = make_checkpoint(experts=2, layers=1)
    first = write_source(
        tmp_path / "first",
        plain,
        lambda module: ".experts." in module,
        None,
        partial(by_hand.nvfp4, modelopt=True),
    )
    source = write_source(
        tmp_path / "mixed",
        first.path,
        lambda module: module in ATTENTION,
        MIXED,
        by_hand.fp8_tensor,
    )
    source.numbers |= first.numbers
    for name in ("k_proj.k_scale", "v_proj.v_scale"):
        edit(source.path, {f"model.layers.0.self_attn.{name}": torch.tensor(0.5)}, new=True)
    return source


def test_each_module_is_read_by_its_own_algorithm(mixed, read_tensors, config_of, tmp_path):
    result = convert(mixed.path, tmp_path / "out", format="bf16")
    assert {(error.source, error.weights) for error in result.requantization_errors} == {
        ("nvfp4", len(EXPERTS)),
        ("fp8_tensor", len(ATTENTION)),
    }
    found = read_tensors(tmp_path / "out")
    assert len(mixed.numbers) == len(EXPERTS) + len(ATTENTION)
    for weight, numbers in mixed.numbers.items():
        assert torch.equal(found[weight], numbers.float().bfloat16()), weight
    assert not any(name.endswith("_scale") for name in found)
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert verify(tmp_path / "out", against=mixed.path).ok


def test_what_is_not_of_weights_is_left_out_and_what_cannot_stay_is_said(
    mixed, read_tensors, config_of, tmp_path
):
    result = convert(mixed.path, tmp_path / "out", format="nvfp4", dialect="modelopt")
    warnings = "\n".join(result.plan.warnings)
    # input_scale of all modules, and two of the KV cache.
    assert f"{len(mixed.numbers) + 2} calibrated scales of activations or of the KV" in warnings
    assert f"{len(ATTENTION)} weights that no rule converts" in warnings
    found, stored = read_tensors(tmp_path / "out"), read_tensors(mixed.path)
    for module in EXPERTS:
        for name in ("weight", "weight_scale", "weight_scale_2"):
            one, other = (t[f"{module}.{name}"].reshape(-1) for t in (found, stored))
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert all(found[f"{module}.weight"].dtype == torch.bfloat16 for module in ATTENTION)
    assert not any(name.endswith(("input_scale", "k_scale", "v_scale")) for name in found)
    entry = config_of(tmp_path / "out")["quantization_config"]
    assert entry["quant_algo"] == "W4A16_NVFP4"
    assert {*ATTENTION} <= {*entry["ignore"]}
    assert not {"quantized_layers", "kv_cache_scheme"} & entry.keys()
    assert verify(tmp_path / "out", against=mixed.path).ok


def test_attention_that_is_quantized_stays_where_config_can_say_so(
    make_checkpoint, read_tensors, tmp_path
):
    roles = ["attention", "routed_experts"]
    recipe = {"rules": [{"roles": roles, "format": "nvfp4"}], "output": {"dialect": "modelopt"}}
    source = convert(
        make_checkpoint(experts=2, layers=1),
        tmp_path / "source",
        recipe=Recipe.model_validate(recipe),
    ).output
    out = convert(source, tmp_path / "out", format="nvfp4", dialect="modelopt").output
    before, after = read_tensors(source), read_tensors(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        one, other = tensor.reshape(-1), after[name].reshape(-1)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


# As `convert_hf_quant_config_format` of Model-Optimizer 0.47 writes it: it has no groups for MXFP8.
MXFP8 = {
    "ignore": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn*"],
    "quant_algo": "MXFP8",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}


@pytest.mark.parametrize("method", ["modelopt", "modelopt_mxfp8"])
def test_mxfp8_is_read_as_engines_read_it(
    make_checkpoint, write_source, by_hand, read_tensors, tmp_path, method
):
    source = write_source(
        tmp_path / "source",
        make_checkpoint(experts=2, layers=1),
        lambda module: ".experts." in module,
        MXFP8 | {"quant_method": method},
        by_hand.mxfp8,
    )
    out = convert(source.path, tmp_path / "out", format="bf16").output
    found = read_tensors(out)
    assert len(source.numbers) == len(EXPERTS)
    for weight, numbers in source.numbers.items():
        assert torch.equal(found[weight].double(), numbers), weight
    assert verify(out, against=source.path).ok
    with pytest.raises(UnsupportedError, match="reads only as a source"):
        get_dialect("modelopt").reader(MXFP8)(EXPERT)


def test_a_module_of_a_mixed_checkpoint_may_be_mxfp8():
    layers = {
        EXPERT: {"quant_algo": "MXFP8", "group_size": 32},
        ATTENTION[0]: {"quant_algo": "FP8"},
    }
    read = get_dialect("modelopt").reader(MIXED | {"quantized_layers": layers}, weights_only=True)
    assert read(EXPERT) == "mxfp8"
    assert read(ATTENTION[0]) == "fp8_tensor"


NAMED = {
    "by its own name": {EXPERT: {"quant_algo": "NVFP4", "group_size": 16}},
    "by the layer's": {"model.layers.0.mlp.experts": {"quant_algo": "nvfp4"}},
}


@pytest.mark.parametrize("case", NAMED)
def test_a_module_of_a_mixed_checkpoint_is_found(case):
    read = get_dialect("modelopt").reader(
        MIXED | {"quantized_layers": NAMED[case]}, weights_only=True
    )
    assert read(EXPERT) == "nvfp4"
    assert read("model.layers.0.mlp.gate") is None


def test_vision_models_have_two_names_for_their_language_model():
    layers = {f"model.language_model.{EXPERT[6:]}": {"quant_algo": "FP8_PB_WO", "group_size": 128}}
    read = get_dialect("modelopt").reader(MIXED | {"quantized_layers": layers}, weights_only=True)
    assert read(f"language_model.{EXPERT}") == "fp8_block"
    assert read(f"model.language_model.{EXPERT[6:]}") == "fp8_block"
    assert read(EXPERT) is None


@pytest.mark.parametrize("algorithm", [*UNREAD, "NVFP5", None, 4])
def test_what_is_not_read_is_refused_with_what_it_is_and_the_next_step(algorithm):
    entries = [
        {"quant_method": "modelopt", "quant_algo": algorithm},
        MIXED | {"quantized_layers": {EXPERT: {"quant_algo": algorithm}}},
    ]
    for entry in entries:
        with pytest.raises(UnsupportedError) as error:
            get_dialect("modelopt").reader(entry, weights_only=True)(EXPERT)
        message = str(error.value)
        assert message.startswith(f"{EXPERT}: quantization_config")
        assert f"quant_algo is {algorithm}" in message
        assert UNREAD.get(algorithm, "") in message
        assert "W4A16_NVFP4" in message
        assert message.endswith("or the unquantized one")


@pytest.mark.parametrize(
    ("algorithm", "group_size"), [("NVFP4", 32), ("FP8_PB_WO", 64), ("MXFP8", 16)]
)
def test_groups_of_another_width_are_refused(algorithm, group_size):
    entry = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": group_size}
    with pytest.raises(
        UnsupportedError, match=f"group_size is {group_size}, .*{algorithm} only with"
    ):
        get_dialect("modelopt").reader(entry, weights_only=True)(EXPERT)


@pytest.mark.parametrize(("algorithm", "size"), [("NVFP4", 32), ("MXFP8", 16)])
def test_groups_of_another_width_are_refused_where_only_config_groups_says_so(algorithm, size):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": size}}}
    entry = {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": groups}
    with pytest.raises(
        UnsupportedError,
        match=f"config_groups.group_0.weights.group_size is {size}, .*{algorithm} only with",
    ):
        get_dialect("modelopt").reader(entry, weights_only=True)(EXPERT)


@pytest.mark.parametrize("groups", [[], {"group_0": []}, {"group_0": {"weights": 8}}])
def test_config_groups_of_another_type_are_refused(groups):
    entry = MXFP8 | {"config_groups": groups}
    with pytest.raises(CheckpointError, match=r"config_groups.* not an object"):
        get_dialect("modelopt").reader(entry, weights_only=True)


def test_a_mixed_checkpoint_that_nobody_describes_is_refused(make_form, tmp_path):
    source = make_form("modelopt, mixed", path=tmp_path / "source")
    (source.path / "hf_quant_config.json").unlink()
    with pytest.raises(UnsupportedError, match="quantized_layers is missing here and in hf_quant"):
        convert(source.path, tmp_path / "out", format="bf16")


@pytest.mark.parametrize("layers", [[], {EXPERT: "NVFP4"}])
def test_layers_of_another_type_are_refused(layers):
    with pytest.raises(CheckpointError, match=r"quantized_layers.* not an object"):
        get_dialect("modelopt").reader(MIXED | {"quantized_layers": layers}, weights_only=True)


def test_the_scale_of_a_single_block_may_be_a_scalar_and_no_other(by_hand):
    dialect = get_dialect("modelopt")
    for shape, fits in (((128, 128), True), ((128, 256), False)):
        tensors = by_hand.fp8_block(shape, torch.Generator()).tensors
        stored = {"m.weight": tensors["weight"], "m.weight_scale": torch.tensor(0.5)}
        if fits:
            assert dialect.from_disk("m", "fp8_block", stored).scale.tolist() == [[0.5]]
        else:
            with pytest.raises(CheckpointError, match=r"m\.weight_scale: shape \[\], not \[1, 2\]"):
                dialect.from_disk("m", "fp8_block", stored)


def test_two_scales_of_one_weight_are_refused(by_hand):
    tensors = by_hand.fp8_block((256, 128), torch.Generator()).tensors
    dialect = get_dialect("modelopt")
    stored = {f"m.{name}": tensor for name, tensor in tensors.items()}
    assert dialect.from_disk("m", "fp8_block", stored).scale.shape == (2, 1)
    stored["m.weight_scale"] = stored["m.weight_scale_inv"]
    with pytest.raises(
        CheckpointError, match=r"m\.weight_scale and m\.weight_scale_inv: both are present"
    ):
        dialect.from_disk("m", "fp8_block", stored)
    del stored["m.weight_scale"], stored["m.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=r"m\.weight_scale is missing"):
        dialect.from_disk("m", "fp8_block", stored)


def test_the_json_of_a_mixed_source_names_both_formats(mixed):
    result = CliRunner().invoke(cli, ["inspect", str(mixed.path), "--json"])
    assert result.exit_code == 0, result.output
    assert sorted(json.loads(result.stdout)["formats"]) == ["fp8_tensor", "nvfp4"]
