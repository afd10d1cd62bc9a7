"""How engines match names in a quantization_config, by the rules of their sources."""

from __future__ import annotations

import pytest

from moequant.compatibility.lookup import lacks_linear_target, lookups
from moequant.compatibility.modules import Module
from moequant.dialects.names import expert_block
from moequant.models import ROUTED_EXPERTS, TensorRole

EXPERT = "model.layers.3.mlp.experts.7.gate_proj"
VISION = "model.language_model.layers.3.mlp.experts.7.gate_proj"
LINEAR = "model.layers.3.self_attn.o_proj"


def module(name, *, quantized=True):
    is_expert = ".experts." in name
    role = TensorRole(
        role=ROUTED_EXPERTS if is_expert else "attention",
        layer=3,
        expert=7 if is_expert else None,
        projection="gate" if is_expert else None,
    )
    return Module(name=name, role=role, group=role.role, parts={}, quantized=quantized, stated=None)


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"),
            ("q_a_proj", "kv_a_proj_with_mqa"))  # fmt: skip


def asked(dialect, config, name, classes=(), **settings):
    """Whether vLLM and SGLang take a module for quantized, with the others of its merged layer."""
    parent, _, leaf = name.rpartition(".")
    beside = next((leaves for leaves in SIBLINGS if leaf in leaves), (leaf,))
    modules = [module(f"{parent}.{one}") for one in beside]
    found = lookups(dialect, config, modules, classes)
    return tuple(found[engine](module(name, **settings)) for engine in ("vLLM", "SGLang"))


def ct(*targets, ignore=()):
    return {"config_groups": {"group_0": {"targets": [*targets]}}, "ignore": [*ignore]}


@pytest.mark.parametrize(
    ("config", "name", "vllm", "sglang"),
    [
        (ct("Linear"), EXPERT, True, True),
        (ct("Linear"), LINEAR, True, True),
        (ct("FusedMoE"), EXPERT, False, True),
        (ct("RoutedExperts"), EXPERT, True, False),
        # Both ask for expert 0 alone.
        (ct("re:.*experts.0.gate_proj"), EXPERT, True, True),
        (ct("re:.*experts.7.gate_proj"), EXPERT, False, False),
        (ct("Linear", ignore=["re:.*experts.*"]), EXPERT, False, False),
        # SGLang takes a plain name for the end of a name, too.
        (ct("Linear", ignore=["o_proj"]), LINEAR, True, False),
        (ct("Linear", ignore=[LINEAR]), LINEAR, False, False),
        # vLLM renames the language model of a vision model, but not in regular expressions.
        (ct(r"re:model\.language_model\.layers\..*experts.*"), VISION, False, True),
        (ct(r"re:.*layers\..*experts.*"), VISION, True, True),
    ],
)
def test_compressed_tensors(config, name, vllm, sglang):
    assert asked("compressed-tensors", config, name) == (vllm, sglang)


def test_sglang_stops_at_a_layer_that_is_neither_targeted_nor_ignored():
    config = ct("re:.*experts.*")
    assert asked("compressed-tensors", config, LINEAR, quantized=False) == (False, True)
    assert asked("compressed-tensors", config, LINEAR, quantized=True) == (False, False)


@pytest.mark.parametrize(
    ("listed", "name", "vllm", "sglang"),
    [
        ((LINEAR,), LINEAR, False, False),
        (("layers.3.self_attn.o_proj",), LINEAR, True, False),
        (("o_proj",), LINEAR, True, False),
        # A part of a component is none.
        (("proj",), LINEAR, True, True),
        (("model.layers.3.mlp.experts",), EXPERT, False, False),
        (("model.layers.3.mlp.experts.0.gate_proj",), EXPERT, False, False),
        (("model.layers.3",), EXPERT, True, False),
    ],
)
def test_fp8(listed, name, vllm, sglang):
    assert asked("fp8", {"modules_to_not_convert": [*listed]}, name) == (vllm, sglang)
    assert asked("fp8", {"ignored_layers": [*listed]}, name) == (vllm, sglang)


@pytest.mark.parametrize(
    ("listed", "name", "vllm", "sglang"),
    [
        ((LINEAR,), LINEAR, False, False),
        (("model.layers.3.self_attn*",), LINEAR, False, False),
        # vLLM takes an entry for any part of a name, SGLang for whole components.
        (("mlp.exp",), EXPERT, False, True),
        (("model.layers.3.self_attn.o",), LINEAR, False, True),
        (("o_proj",), LINEAR, False, False),
        (("mtp*",), EXPERT, True, True),
    ],
)
def test_modelopt(listed, name, vllm, sglang):
    assert asked("modelopt", {"ignore": [*listed]}, name) == (vllm, sglang)
    assert asked("modelopt", {"exclude_modules": [*listed]}, name) == (vllm, sglang)


QKV = "model.layers.3.self_attn.qkv_proj"
QUERY = "model.layers.3.self_attn.q_proj"
LATENT = "model.layers.3.self_attn.q_a_proj"
GATE = "model.layers.3.mlp.gate_proj"


@pytest.mark.parametrize(
    ("dialect", "key", "listed", "name", "vllm", "sglang"),
    [
        # Both engines look up the merged layer in Model-Optimizer's list.
        ("modelopt", "ignore", QKV, QUERY, False, False),
        ("modelopt", "ignore", "model.layers.3.mlp.gate_up_proj", GATE, False, False),
        ("modelopt", "ignore", "model.layers.3.self_attn*", QUERY, False, False),
        # SGLang takes a short entry for one component, or for the whole name.
        ("modelopt", "ignore", "mlp.gate_up_proj", GATE, False, True),
        ("modelopt", "ignore", "gate_up_proj", GATE, False, False),
        # vLLM does not find a part of the name of a layer that it merges.
        ("modelopt", "ignore", "mlp.gate_proj", GATE, True, False),
        # A router's name is the beginning of a merged layer's.
        ("modelopt", "ignore", "model.layers.3.mlp.gate", GATE, False, True),
        ("modelopt", "ignore", "model.layers.3.self_attn.fused_qkv_a_proj", LATENT, False, True),
        ("modelopt", "ignore", "model.layers.9.self_attn.q_a_proj", LATENT, True, False),
        ("fp8", "modules_to_not_convert", QKV, QUERY, False, True),
        ("compressed-tensors", "ignore", QKV, QUERY, False, False),
        # Of a merged layer whose parts it knows, SGLang takes its name and no pattern for it.
        ("compressed-tensors", "ignore", "re:.*qkv_proj", QUERY, False, True),
    ],
)
def test_a_list_may_name_the_layer_into_which_an_engine_merges_others(
    dialect, key, listed, name, vllm, sglang
):
    config = ct("Linear") if dialect == "compressed-tensors" else {}
    assert asked(dialect, config | {key: [listed]}, name) == (vllm, sglang)


@pytest.mark.parametrize(
    ("model_class", "listed", "name", "sglang"),
    [
        # No class of vLLM 0.33 needs the merged name; of SGLang 0.5.23 most do.
        ("Qwen3MoeForCausalLM", QUERY, QUERY, False),
        ("MixtralForCausalLM", QUERY, QUERY, True),
        ("MixtralForCausalLM", QKV, QUERY, False),
        ("MixtralForCausalLM", "re:.*qkv_proj", QUERY, False),
        ("MixtralForCausalLM", "re:.*self_attn.*", QUERY, False),
        ("MixtralForCausalLM", "self_attn.qkv_proj", QUERY, False),
        ("MixtralForCausalLM", LINEAR, LINEAR, False),
        ("DeepseekV3ForCausalLM", GATE, GATE, True),
        ("DeepseekV3ForCausalLM", LATENT, LATENT, False),
        ("Glm4MoeLiteForCausalLM", LATENT, LATENT, True),
        ("NobodyKnowsForCausalLM", QUERY, QUERY, False),
    ],
)
def test_a_class_of_sglang_may_know_a_merged_layer_by_its_own_name_alone(
    model_class, listed, name, sglang
):
    config = ct("Linear", ignore=[listed])
    assert asked("compressed-tensors", config, name, [model_class])[1] is sglang
    if listed == name:
        assert not asked("compressed-tensors", config, name, [model_class])[0]
    # In the dialect fp8 SGLang knows q, k and v, and gate and up, of every class.
    fp8 = {"modules_to_not_convert": [name]}
    of_mla = model_class == "Glm4MoeLiteForCausalLM"
    assert asked("fp8", fp8, name, [model_class]) == (False, of_mla)


def test_a_layer_that_has_no_other_beside_it_is_not_merged():
    """As the q_proj of DeepSeek-V2-Lite, whose keys come from MLA."""
    config = ct("Linear", ignore=[QUERY])
    found = lookups("compressed-tensors", config, [module(QUERY)], ["DeepseekV2ForCausalLM"])
    assert not found["SGLang"](module(QUERY))


@pytest.mark.parametrize(
    ("model_class", "layers", "name", "vllm", "sglang"),
    [
        ("Qwen3MoeForCausalLM", (QUERY,), QUERY, True, True),
        ("MixtralForCausalLM", (QUERY,), QUERY, True, False),
        ("MixtralForCausalLM", (QKV,), QUERY, True, True),
        ("DeepseekV3ForCausalLM", (GATE,), GATE, True, False),
        ("DeepseekV3ForCausalLM", (LATENT,), LATENT, True, True),
        ("Glm4MoeLiteForCausalLM", (LATENT,), LATENT, True, False),
        ("MixtralForCausalLM", (LINEAR,), LINEAR, True, True),
        ("MixtralForCausalLM", (QUERY,), LINEAR, False, False),
        ("MixtralForCausalLM", ("model.layers.3.mlp.experts",), EXPERT, True, True),
        ("MixtralForCausalLM", (EXPERT,), EXPERT, True, True),
        # vLLM takes experts that are not listed for what stands beside them.
        ("MixtralForCausalLM", ("model.layers.3.mlp.shared_experts.up_proj",), EXPERT, True, False),
        ("Qwen3MoeForCausalLM", (VISION.replace("layers.3", "layers.4"),), VISION, False, False),
        ("Qwen3MoeForCausalLM", (VISION.replace("model.language_model", "language_model.model"),),
         VISION, True, True),
    ],
)  # fmt: skip
def test_mixtures_of_modelopt(model_class, layers, name, vllm, sglang):
    config = {"quantized_layers": {key: {"quant_algo": "NVFP4"} for key in layers}}
    assert asked("modelopt", config, name, [model_class]) == (vllm, sglang)
    kept = config | {"ignore": [expert_block(name) or name]}
    assert asked("modelopt", kept, name, [model_class]) == (False, False)


def test_the_reader_of_modelopt_takes_merged_names_too():
    from moequant.dialects import get_dialect

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [QKV]}
    format_of = get_dialect("modelopt").reader(config, weights_only=True)
    assert format_of(QUERY) is None
    assert format_of(LINEAR) == format_of(EXPERT) == "nvfp4"


def test_other_dialects_are_read_as_their_readers_do():
    assert lookups("gpt-oss", {}) == lookups("moequant", {}) == {}


def test_sglang_looks_up_w4a8_by_the_target_linear_and_the_format_at_the_top():
    assert not lacks_linear_target(ct("Linear") | {"format": "pack-quantized"})
    assert lacks_linear_target(ct("Linear"))
    assert lacks_linear_target(ct("re:.*experts.*") | {"format": "pack-quantized"})


@pytest.mark.parametrize("dialect", ["fp8", "compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    "model_class", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"]
)
def test_lists_of_ours_name_what_every_class_looks_up(dialect, model_class):
    from moequant.dialects import get_dialect

    at = "model.layers.3"
    kept = [f"{at}.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    kept += [f"{at}.self_attn.{leaf}" for leaf in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
    kept += [f"{at}.indexer.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    format = "fp8_block" if dialect == "fp8" else "nvfp4"
    config = get_dialect(dialect).quantization_config({EXPERT: format}, kept)
    modules = [module(name) for name in kept]
    found = lookups(dialect, config, modules, [model_class])
    for engine in ("vLLM", "SGLang"):
        assert [m.name for m in modules if found[engine](m)] == [], engine
        assert found[engine](module(EXPERT))


def test_a_merged_layer_is_not_listed_where_a_part_of_it_is_converted():
    from moequant.dialects import get_dialect

    parts = [f"model.layers.3.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    config = get_dialect("compressed-tensors").quantization_config(
        {EXPERT: "nvfp4", parts[0]: "nvfp4"}, parts[1:]
    )
    assert QKV not in config["ignore"]
