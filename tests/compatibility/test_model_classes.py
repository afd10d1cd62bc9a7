"""`architectures` of config.json, by which vLLM and SGLang choose the class of a model."""

from __future__ import annotations

import json
import shutil

import pytest

from moequant import convert
from moequant.compatibility.model_classes import classes_of, name_another_model
from moequant.compatibility.tables import read_table
from moequant.models import architectures, read_architectures

OWN = """
[[architecture]]
name = "own"
model_types = ["qwen3_moe"]
experts = "model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
projections = { gate = "gate_proj", up = "up_proj", down = "down_proj" }
config.experts = ["num_experts"]
config.top_k = ["num_experts_per_tok"]
config.intermediate = ["moe_intermediate_size"]
roles.router = ["model.layers.{layer}.mlp.gate.weight"]
"""


@pytest.fixture
def with_classes(make_checkpoint, tmp_path):
    """with_classes(value): a checkpoint whose config.json has these `architectures`."""

    def make(value, **fields):
        path = shutil.copytree(make_checkpoint(), tmp_path / "c")
        config = json.loads((path / "config.json").read_text()) | fields
        config["architectures"] = value
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def against(engines, key):
    return {said.rule: said.text for said in engines[key].against}


@pytest.mark.parametrize("value", [None, [], "Qwen3MoeForCausalLM", [3]])
def test_without_architectures_vllm_and_sglang_do_not_run_the_model(with_classes, check, value):
    engines = check(with_classes(value))
    text = against(engines, "vllm")["no-architectures-vllm"]
    assert "model_type qwen3_moe, which it runs as an embedding model" in text
    assert [*against(engines, "sglang")] == ["no-architectures-sglang"]
    assert engines["transformers"].loads, "it chooses by model_type"


@pytest.mark.parametrize("value", ["LlamaForCausalLM", "MixtralForCausalLM", "Qwen3Model"])
def test_the_class_of_another_model_is_named_beside_the_right_one(with_classes, check, value):
    engines = check(with_classes([value]))
    for key in ("vllm", "sglang"):
        text = against(engines, key)["other-architectures"]
        assert f"is {value}, but the class of model_type qwen3_moe is Qwen3MoeForCausalLM" in text
        assert not engines[key].loads
    assert engines["transformers"].loads


@pytest.mark.parametrize(
    "value", [["Qwen3MoeForCausalLM"], ["Custom", "Qwen3MoeForCausalLM"], ["Qwen3MoEForCausalLM"]]
)
def test_the_right_class_is_found_among_others_in_any_spelling(with_classes, check, value):
    engines = check(with_classes(value))
    assert engines["vllm"].loads
    assert engines["sglang"].loads


@pytest.mark.parametrize(
    "value", ["Qwen3MoeModel", "Qwen3MoeForSequenceClassification", "Qwen3MoeRewardModel"]
)
def test_a_class_of_the_model_for_another_task_is_a_caution(with_classes, check, value):
    engines = check(with_classes([value]))
    for key in ("vllm", "sglang"):
        assert engines[key].loads
        (caution,) = (text for text in engines[key].verdict.cautions if "architectures" in text)
        assert f"is {value}, by which" in caution
        assert "without text generation" in caution


def test_convert_says_the_same(with_classes):
    path = with_classes(["MixtralForCausalLM"])
    plan = convert(path, path.with_name("out"), format="nvfp4", dry_run=True).plan
    loads = {verdict.engine: verdict.loads for verdict in plan.engines}
    assert loads["vLLM"] is False
    assert loads["SGLang"] is False
    assert any("is MixtralForCausalLM, but the class of model_type" in w for w in plan.warnings)


def test_a_class_of_an_unknown_model_is_not_judged():
    assert classes_of("my_moe") == ()
    assert not name_another_model(["MyMoeForCausalLM"], classes_of("my_moe"))


def test_the_class_of_a_model_in_a_users_file_is_not_judged(with_classes, check, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    engines = check(with_classes(["OwnForCausalLM"]), own=read_architectures(path))
    assert not [said for said in engines["vllm"].against if "architectures" in said.rule]


def test_every_model_type_has_classes_and_those_of_transformers_are_among_them():
    from transformers.models.auto import modeling_auto

    table = read_table("classes.toml")
    types = {t for a in architectures() for t in (*a.model_types, *a.flat_model_types)}
    assert {*table} == types
    for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        for model_type in types & names.keys():
            found = names[model_type]
            wanted = {found} if isinstance(found, str) else {*found}
            assert wanted <= {*table[model_type]}, model_type
