"""The architecture table against names and configs that real releases and transformers write."""

from __future__ import annotations

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moequant.checkpoint.source import Checkpoint
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import (
    PROJECTIONS,
    TensorRole,
    architectures,
    check_complete,
    check_shapes,
    classify_all,
    find_architecture,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
}
MODELS = {
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SIZES,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            num_experts=4,
            mlp_only_layers=[0],
        ),
        (1, 2),
        16,
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, decoder_sparse_step=2),
        (1,),
        16,
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4), (0, 1, 2), 48),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SIZES, num_experts=4), (0, 1, 2), 48),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config(**SIZES, **MLA), (1, 2), 16),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**SIZES, **MLA), (1, 2), 16),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    model, config, layers, intermediate = MODELS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model(config).save_pretrained(path)
    return Checkpoint.open(path), layers, intermediate


def test_every_tensor_of_a_saved_model_is_explained(saved):
    checkpoint, layers, intermediate = saved
    architecture = find_architecture(checkpoint.config)
    roles = classify_all(architecture, checkpoint.tensors)
    assert "other" not in {role.role for role in roles.values()}
    moe = architecture.read_config(checkpoint.config)
    assert (moe.experts, moe.top_k, moe.hidden, moe.intermediate) == (4, 2, 32, intermediate)
    assert moe.activation == "silu"
    assert check_complete(architecture, moe, roles) == layers
    check_shapes(moe, roles, checkpoint.tensors)


def test_routers_and_biases_are_never_convertible(saved):
    checkpoint, _, _ = saved
    architecture = find_architecture(checkpoint.config)
    for name in checkpoint.tensors:
        if name.endswith((".gate.weight", "e_score_correction_bias", "shared_expert_gate.weight")):
            assert architecture.classify(name).role in {
                "router",
                "router_bias",
                "shared_expert_gate",
            }


def test_every_model_type_of_the_table_is_tested_against_its_class():
    assert {t for a in architectures() for t in a.model_types} == set(MODELS)


@pytest.mark.parametrize("architecture", architectures(), ids=lambda a: a.name)
def test_expert_names_and_roles_are_inverse(architecture):
    for projection in PROJECTIONS:
        name = architecture.expert_tensor(12, 107, projection)
        assert architecture.classify(name) == TensorRole(
            role="routed_experts", layer=12, expert=107, projection=projection
        )


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "hidden_size": 8,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
}


def deepseek_roles(layers=(2, 3), experts=(0, 1), projections=PROJECTIONS):
    architecture = find_architecture(DEEPSEEK)
    names = [
        architecture.expert_tensor(layer, expert, projection)
        for layer in layers
        for expert in experts
        for projection in projections
    ]
    return architecture, classify_all(architecture, dict.fromkeys(names))


def test_multi_token_prediction_layers_count_where_they_are_present():
    architecture, roles = deepseek_roles()
    moe = architecture.read_config(DEEPSEEK)
    assert check_complete(architecture, moe, roles) == (2, 3)
    assert architecture.classify("model.layers.3.eh_proj.weight").role == "mtp"
    architecture, roles = deepseek_roles(layers=(2,))
    assert check_complete(architecture, moe, roles) == (2,)


@pytest.mark.parametrize(
    ("present", "named"),
    [
        ({"experts": (0,)}, "layers.2.mlp.experts.1.gate_proj.weight: missing"),
        ({"projections": ("gate", "down")}, "layers.2.mlp.experts.0.up_proj.weight: missing"),
        ({"experts": (0, 1, 2)}, "layers.2.mlp.experts.2.gate_proj.weight: not expected"),
        ({"layers": (1, 2)}, "layers.1.mlp.experts.0.gate_proj.weight: not expected"),
        ({"layers": (3,)}, "layers.2.mlp.experts.0.gate_proj.weight: missing"),
    ],
)
def test_an_incomplete_set_of_experts_is_named(present, named):
    architecture, roles = deepseek_roles(**present)
    with pytest.raises(CheckpointError, match=named):
        check_complete(architecture, architecture.read_config(DEEPSEEK), roles)


def test_a_promise_of_too_many_experts_costs_no_memory():
    architecture, roles = deepseek_roles()
    moe = architecture.read_config(DEEPSEEK | {"n_routed_experts": 1_000_000})
    with pytest.raises(CheckpointError, match=r"experts\.2\..*missing"):
        check_complete(architecture, moe, roles)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.0.gate_proj.bias",
        "model.layers.0.mlp.experts.0.w1.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv",
        "model.layers.0.mlp.Expert.7.weight",
        "model.layers.00.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.07.gate_proj.weight",
        "model.layers.0.mlp.experts.\u0663.gate_proj.weight",
        f"model.layers.{'9' * 5000}.mlp.experts.0.gate_proj.weight",
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_tensor_that_looks_like_an_expert_is_never_skipped(name, model_type):
    with pytest.raises(UnsupportedError, match="looks like an expert"):
        find_architecture({"model_type": model_type}).classify(name)


def test_unknown_architectures_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"'llama'.*qwen3_moe"):
        find_architecture({"model_type": "llama"})
    with pytest.raises(UnsupportedError, match="None"):
        find_architecture({})


@pytest.mark.parametrize("value", [None, "8", 8.0, True, 0, -1, 10**9, [8]])
def test_a_config_without_a_usable_number_is_refused(value):
    config = DEEPSEEK | {"n_routed_experts": value}
    with pytest.raises(CheckpointError, match="n_routed_experts"):
        find_architecture(config).read_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("moe_layer_freq", 0), ("first_k_dense_replace", "1"), ("hidden_act", 3)],
)
def test_a_config_with_a_wrong_type_is_refused(key, value):
    config = DEEPSEEK | {key: value}
    with pytest.raises(CheckpointError, match=key):
        find_architecture(config).read_config(config)


def test_a_wrong_shape_is_named_with_the_shape_wanted():
    class Header:
        shape = (8, 4)

    architecture, roles = deepseek_roles()
    with pytest.raises(CheckpointError, match=r"gate_proj.weight: shape \[8, 4\].*\[4, 8\]"):
        check_shapes(architecture.read_config(DEEPSEEK), roles, {name: Header() for name in roles})
