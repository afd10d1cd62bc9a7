"""The architecture table against names and configs that real releases and transformers write."""

from __future__ import annotations

import re

import pytest

from moequant.act_fn import ActFn
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import (
    CONVERTIBLE_ROLES,
    PROJECTIONS,
    Architecture,
    TensorRole,
    architectures,
    find_architecture,
    read_model,
)

ACT_FNS = {
    "gpt_oss": ActFn(name="swigluoai", alpha=1.702, limit=7.0),
    "minimax_m3_vl": ActFn(name="swigluoai", alpha=1.702, limit=7.0),
    "nemotron_h": ActFn(name="relu2", gated=False),
    "gemma4": ActFn(name="gelu_tanh"),
    "gemma4_text": ActFn(name="gelu_tanh"),
    "deepseek_v4": ActFn(name="silu", limit=10.0),
    "glm5_next": ActFn(name="silu", limit=10.0),
    "hy_v4": ActFn(name="silu", limit=10.0),
    "hy_v4_vl": ActFn(name="silu", limit=10.0),
}


def test_every_tensor_of_a_saved_model_is_explained(saved):
    checkpoint, case = saved.checkpoint, saved.case
    model = read_model(checkpoint.config, checkpoint.tensors)
    assert "other" not in {role.role for role in model.roles.values()}
    moe = model.moe
    assert (moe.experts, moe.top_k, moe.hidden, moe.intermediate) == (4, 4, 64, 96)
    model_type = checkpoint.config["model_type"]
    assert moe.act_fn == ACT_FNS.get(model_type, ActFn(name="silu"))
    assert model.layers == case.layers
    assert bool(model.places) == (case.stack is not None)


def test_routers_and_biases_are_never_convertible(saved):
    never = ("bias", "gate.weight", "router.weight", "wg.weight", "classifier.weight")
    architecture = find_architecture(saved.checkpoint.config)
    routers = 0
    for name in saved.checkpoint.tensors:
        role = architecture.classify(name).role
        routers += role == "router"
        # HY-V4's linear_gate is the gate projection of an MLP.
        linear = ".self_attn." in name or name.endswith(".linear_gate.weight")
        if name.endswith((*never, "router.layer.weight")) and not linear:
            assert role not in CONVERTIBLE_ROLES, name
    assert routers == len(saved.case.layers)


def test_the_table_says_of_every_model_type_how_it_is_tested(models):
    """By what is done with the class of transformers; docs/architectures.md prints it."""
    said = {how: set() for how in ("class", "by_hand")}
    for architecture in architectures():
        assert architecture.tested.keys() <= {*said, "not_loaded"}
        for model_type in architecture.model_types:
            how = [h for h in said if model_type in architecture.tested.get(h, {})]
            said[how[0] if how else "class"].add(model_type)
    own = {m for m, case in models.items() if case.config.model_type == m}
    as_saved = {m for m in own if models[m].released.__name__ == "as_it_is"}
    assert said == {"class": as_saved, "by_hand": {*models} - as_saved}


@pytest.mark.parametrize("architecture", architectures(), ids=lambda a: a.name)
def test_expert_names_and_roles_are_inverse(architecture):
    for projection in architecture.projections:
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


class Header:
    def __init__(self, *shape):
        self.shape = shape


def deepseek(layers=(2, 3), experts=(0, 1), projections=PROJECTIONS):
    """Headers of experts."""
    architecture = find_architecture(DEEPSEEK)
    return {
        architecture.expert_tensor(layer, expert, projection): (
            Header(8, 4) if projection == "down" else Header(4, 8)
        )
        for layer in layers
        for expert in experts
        for projection in projections
    }


def test_multi_token_prediction_layers_count_where_they_are_present():
    model = read_model(DEEPSEEK, deepseek())
    assert model.layers == (2, 3)
    assert model.architecture.classify("model.layers.3.eh_proj.weight").role == "mtp"
    assert read_model(DEEPSEEK, deepseek(layers=(2,))).layers == (2,)


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
    with pytest.raises(CheckpointError, match=named) as raised:
        read_model(DEEPSEEK, deepseek(**present))
    (advice,) = re.findall(r"; if [^;]*--architecture FILE.toml", str(raised.value))
    assert advice.count("if ") == 1  # one condition, not one within the other


def test_a_promise_of_too_many_experts_costs_no_memory():
    with pytest.raises(CheckpointError, match=r"experts\.2\..*missing"):
        read_model(DEEPSEEK | {"n_routed_experts": 1_000_000}, deepseek())


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
    for names in ((), ["model.layers.0.mlp.experts.0.w1.weight"]):
        with pytest.raises(
            UnsupportedError, match=r"'llama'.*`moequant formats --architectures`.*Describe"
        ) as raised:
            find_architecture({"model_type": "llama"}, names=names)
        assert "dense" not in str(raised.value)
    with pytest.raises(UnsupportedError, match=r"has no model_type, .*; take the config\.json of"):
        find_architecture({})


def test_a_dense_model_is_told_that_it_has_no_experts():
    names = ["model.layers.0.mlp.gate_proj.weight"]
    with pytest.raises(
        UnsupportedError, match=r"'llama'.*no tensor has 'expert' in its name: .* a dense model"
    ):
        find_architecture({"model_type": "llama"}, names=names)


@pytest.mark.parametrize("value", [None, "8", 8.0, True, 0, -1, 10**9, [8]])
def test_a_config_without_a_usable_number_is_refused(value):
    config = DEEPSEEK | {"n_routed_experts": value}
    with pytest.raises(CheckpointError, match="n_routed_experts"):
        find_architecture(config).read_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_layer_freq", 0),
        ("first_k_dense_replace", "1"),
        ("hidden_act", 3),
        ("hidden_act", "a" * 300),
    ],
)
def test_a_config_with_a_wrong_type_is_refused(key, value):
    config = DEEPSEEK | {key: value}
    with pytest.raises(CheckpointError, match=key):
        find_architecture(config).read_config(config)


def test_a_wrong_shape_is_named_with_the_shape_wanted():
    with pytest.raises(
        CheckpointError,
        match=r"gate_proj.weight: shape \[8, 4\].*gives the gate projection of .*\[4, 8\]",
    ):
        read_model(DEEPSEEK, {name: Header(8, 4) for name in deepseek()})


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "swiglu_limit": 7.0,
}


@pytest.mark.parametrize(
    ("fields", "alpha", "limit"),
    [
        ({}, 1.702, 7.0),
        ({"swiglu_limit": None}, 1.702, 7.0),
        ({"swiglu_limit": 10, "swiglu_alpha": 1.5}, 1.5, 10.0),
    ],
)
def test_the_numbers_of_an_activation_are_config_json_s_where_it_has_them(fields, alpha, limit):
    moe = find_architecture(GPT_OSS).read_config(GPT_OSS | fields)
    assert moe.act_fn == ActFn(name="swigluoai", alpha=alpha, limit=limit)


@pytest.mark.parametrize("value", ["7", True, 0, -1.0, float("inf"), float("nan"), [7]])
def test_a_limit_that_is_no_positive_number_is_refused(value):
    config = GPT_OSS | {"swiglu_limit": value}
    with pytest.raises(CheckpointError, match=r"swiglu_limit is .*positive number"):
        find_architecture(config).read_config(config)


def test_more_experts_a_token_than_there_are_is_refused():
    config = GPT_OSS | {"num_experts_per_tok": 3}
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok or .* is 3, .* 2 experts"):
        find_architecture(config).read_config(config)


@pytest.mark.parametrize(
    ("word", "name"),
    [("gelu_pytorch_tanh", "gelu_tanh"), ("swish", "silu"), ("gelu", "gelu"), ("mish", "mish")],
)
def test_other_words_for_an_activation_are_the_runtime_s(word, name):
    config = DEEPSEEK | {"hidden_act": word}
    assert find_architecture(config).read_config(config).act_fn == ActFn(name=name)


def stacks(layers=(0, 1), **changed):
    """Headers of a gpt-oss with 2 experts and H = I = 8; `changed` by the end of the name."""
    shapes = {
        "gate_up_proj": Header(2, 8, 16),
        "gate_up_proj_bias": Header(2, 16),
        "down_proj": Header(2, 8, 8),
        "down_proj_bias": Header(2, 8),
    }
    return {
        f"model.layers.{layer}.mlp.experts.{end}": header
        for layer in layers
        for end, header in (shapes | changed).items()
        if header is not None
    }


def singles(*, biases):
    """As `stacks`, but with each expert's weights on their own."""
    weights = {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight": Header(8, 8)
        for layer in (0, 1)
        for expert in (0, 1)
        for projection in ("gate", "up", "down")
    }
    return weights | (stacks(gate_up_proj=None, down_proj=None) if biases else {})


def test_experts_of_a_stacking_architecture_may_lie_one_by_one_beside_their_biases():
    model = read_model(GPT_OSS, singles(biases=True))
    assert model.layers == (0, 1)
    assert not model.places


def test_stacked_experts_are_found_one_by_one_where_they_lie():
    model = read_model(GPT_OSS, stacks())
    assert model.layers == (0, 1)
    assert len(model.places) == 2 * 2 * 3
    up = "model.layers.1.mlp.experts.1.up_proj.weight"
    assert model.roles[up] == TensorRole(role="routed_experts", layer=1, expert=1, projection="up")
    place = model.places[up]
    assert place.tensor == "model.layers.1.mlp.experts.gate_up_proj"
    assert (place.expert, place.rows, place.transposed) == (1, range(1, 16, 2), True)
    down = model.places["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert (down.expert, down.rows, down.transposed) == (0, None, True)
    assert "model.layers.1.mlp.experts.gate_up_proj" not in model.roles
    assert model.roles["model.layers.1.mlp.experts.down_proj_bias"].role == "expert_bias"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (stacks(layers=(0,)), r"layers.1.mlp.experts.gate_up_proj: missing"),
        (stacks(layers=(0, 1, 2)), r"layers.2.mlp.experts.gate_up_proj: not expected"),
        (stacks(down_proj=None), r"layers.0.mlp.experts.down_proj: missing"),
        (stacks(down_proj_bias=None), r"layers.0.mlp.experts.down_proj_bias: missing"),
        (
            stacks() | {"model.layers.2.mlp.experts.down_proj_bias": Header(2, 8)},
            r"layers.2.mlp.experts.down_proj_bias: not expected",
        ),
        (singles(biases=False), r"layers.0.mlp.experts.gate_up_proj_bias: missing"),
        (stacks(gate_up_proj=Header(3, 8, 16)), r"gate_up_proj: shape \[3, 8, 16\].*\[2, 8, 16\]"),
        (stacks(gate_up_proj=Header(2, 16, 8)), r"gate_up_proj: shape \[2, 16, 8\].*\[2, 8, 16\]"),
        (stacks(down_proj_bias=Header(2, 4)), r"down_proj_bias: shape \[2, 4\].*\[2, 8\]"),
        (
            stacks() | {"model.layers.0.mlp.experts.1.up_proj.weight": Header(8, 8)},
            r"experts.1.up_proj.weight: model.layers.0.mlp.experts.gate_up_proj holds",
        ),
    ],
)
def test_stacks_that_are_not_as_config_json_says_are_named(headers, message):
    with pytest.raises(CheckpointError, match=message):
        read_model(GPT_OSS, headers)


LAYERS = {
    "hidden_size": 8,
    "num_hidden_layers": 6,
    "num_experts_per_tok": 1,
    "intermediate_size": 4,
    "moe_intermediate_size": 4,
    "hidden_act": "silu",
}
GLM = LAYERS | {"model_type": "glm4_moe", "n_routed_experts": 2, "num_nextn_predict_layers": 1}
ERNIE = LAYERS | {"model_type": "ernie4_5_moe", "moe_num_experts": 2, "moe_k": 1}
JAMBA = LAYERS | {"model_type": "jamba", "num_experts": 2}
LLAMA4 = LAYERS | {"model_type": "llama4_text", "num_local_experts": 2}
STEP = LAYERS | {
    "model_type": "step3p5",
    "num_hidden_layers": 3,
    "moe_num_experts": 2,
    "moe_top_k": 1,
    "moe_layers_enum": "1, 2",
    "swiglu_limits": [0.0, 0.0, None],
    "hidden_act": None,
}
KINDS = ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]


@pytest.mark.parametrize(
    ("config", "sparse", "optional"),
    [
        (GLM | {"first_k_dense_replace": 3}, (3, 4, 5), (6,)),
        (GLM | {"first_k_dense_replace": 3, "mlp_layer_types": KINDS}, (1, 3, 4, 5), (6,)),
        (ERNIE | {"moe_layer_start_index": 1}, (1, 2, 3, 4, 5), ()),
        (ERNIE | {"moe_layer_start_index": 1, "moe_layer_end_index": -1}, (1, 2, 3, 4, 5), ()),
        (ERNIE | {"moe_layer_end_index": 4, "moe_layer_interval": 2}, (1, 3), ()),
        (JAMBA | {"expert_layer_period": 3, "expert_layer_offset": 2}, (2, 5), ()),
        (LLAMA4 | {"interleave_moe_layer_step": 2}, (1, 3, 5), ()),
        (LLAMA4 | {"interleave_moe_layer_step": 2, "moe_layers": [0, 4]}, (0, 4), ()),
        (
            STEP | {"num_hidden_layers": 5, "moe_layers_enum": "3,4,5,x", "swiglu_limits": None},
            (3, 4),
            (),
        ),
    ],
)
def test_layers_with_experts_are_those_that_the_model_s_code_builds(config, sparse, optional):
    moe = find_architecture(config).read_config(config)
    assert (moe.sparse_layers, moe.optional_layers) == (sparse, optional)


@pytest.mark.parametrize(
    "config", [GLM | {"mlp_layer_types": "sparse"}, LLAMA4 | {"moe_layers": {"0": 1}}]
)
def test_a_list_of_layers_that_is_no_list_is_refused(config):
    with pytest.raises(
        CheckpointError, match=r"(mlp_layer_types|moe_layers) is .*, but must be a list"
    ):
        find_architecture(config).read_config(config)


def step_headers(**changed):
    shapes = {
        "gate_proj": Header(2, 4, 8),
        "up_proj": Header(2, 4, 8),
        "down_proj": Header(2, 8, 4),
    }
    return {
        f"model.layers.{layer}.moe.{end}.weight": header
        for layer in (1, 2)
        for end, header in (shapes | changed).items()
        if header is not None
    }


def test_step3p5_stacks_gate_and_up_apart():
    """By hand: transformers has no class for this model_type, only for the later one."""
    model = read_model(STEP, step_headers())
    assert model.layers == (1, 2)
    assert model.moe.act_fn == ActFn(name="silu")
    for projection in PROJECTIONS:
        place = model.places[f"model.layers.2.moe.experts.1.{projection}_proj.weight"]
        assert place.tensor == f"model.layers.2.moe.{projection}_proj.weight"
        assert (place.expert, place.rows, place.transposed) == (1, None, False)
    assert len(model.places) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (step_headers(up_proj=None), r"layers.1.moe.up_proj.weight: missing"),
        (step_headers(up_proj=Header(2, 8, 4)), r"up_proj.weight: shape \[2, 8, 4\].*\[2, 4, 8\]"),
        (step_headers(gate_proj=Header(2, 8, 8)), r"gate_proj.weight: shape \[2, 8, 8\]"),
    ],
)
def test_three_stacks_that_are_not_as_config_json_says_are_named(headers, message):
    with pytest.raises(CheckpointError, match=message):
        read_model(STEP, headers)


def test_a_clamp_that_only_some_layers_have_is_read_by_layer():
    """The list goes on for multi-token prediction, which has no experts."""
    config = STEP | {"swiglu_limits": [0.0, None, 7, 9.0]}
    moe = find_architecture(config).read_config(config)
    clamped = ActFn(name="swiglustep", limit=7.0)
    assert moe.limited == ((2, clamped),)
    assert [moe.act_fn_of(layer) for layer in (1, 2)] == [ActFn(name="silu"), clamped]
    without = {k: v for k, v in config.items() if k != "swiglu_limits"}
    assert find_architecture(without).read_config(without).limited == ()


@pytest.mark.parametrize("value", [-1.0, True, False, "7", [7.0], float("inf"), float("nan"), 1e9])
def test_a_limit_of_a_layer_that_is_none_is_refused(value):
    config = STEP | {"swiglu_limits": [value, value, value]}
    with pytest.raises(CheckpointError, match=r"swiglu_limits\[1\] is .*positive number there"):
        find_architecture(config).read_config(config)


def test_limits_that_end_before_the_last_layer_with_experts_are_refused():
    config = STEP | {"swiglu_limits": [0.0, 0.0]}
    with pytest.raises(CheckpointError, match=r"swiglu_limits has 2 entries, but layer 2 holds"):
        find_architecture(config).read_config(config)


HUNYUAN = LAYERS | {"model_type": "hunyuan_v1_moe", "num_experts": 8}


@pytest.mark.parametrize("top_k", [2, [2] * 6])
@pytest.mark.parametrize("size", [4, [4] * 6])
def test_a_quantity_given_for_each_layer_is_read_where_all_are_equal(top_k, size):
    config = HUNYUAN | {"moe_topk": top_k, "moe_intermediate_size": size}
    moe = find_architecture(config).read_config(config)
    assert (moe.top_k, moe.intermediate) == (2, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_topk": [2, 2, 1]}, "moe_topk is 2 in one layer and 1 in another"),
        ({"moe_topk": 2, "moe_intermediate_size": [4, 8]}, "moe_intermediate_size is 4 in one"),
        ({"moe_topk": []}, r"moe_topk is \[\], but"),
        ({"moe_topk": ["2"]}, r"moe_topk is '2', but"),
        ({"moe_topk": 2, "num_experts": [8, 8]}, r"num_experts is \[8, 8\], but"),
    ],
)
def test_layers_of_several_sizes_are_refused(fields, message):
    config = HUNYUAN | fields
    with pytest.raises(CheckpointError, match=message):
        find_architecture(config).read_config(config)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v32", "model.layers.3.self_attn.indexer.wq_b.weight"),
        ("qwen3_next", "model.layers.3.linear_attn.in_proj_qkvz.weight"),
        ("qwen3_next", "mtp.layers.0.mlp.experts.0.gate_proj.weight"),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.gate_up_proj"),
        ("granitemoehybrid", "model.layers.3.shared_mlp.input_linear.weight"),
        ("kimi_k25", "vision_tower.encoder.blocks.0.wqkv.weight"),
    ],
)
def test_what_is_known_and_kept_is_never_convertible(model_type, name):
    role = find_architecture({"model_type": model_type}).classify(name).role
    assert role not in {"other", *CONVERTIBLE_ROLES}


def test_a_section_of_config_json_may_hold_the_sizes():
    table = {
        "name": "nested",
        "model_types": ["nested"],
        "experts": "layers.{layer}.experts.{expert}.{projection}.weight",
        "projections": {"gate": "w1", "up": "w3", "down": "w2"},
        "config": {
            "experts": ["num_local_experts"],
            "top_k": ["num_experts_per_tok"],
            "intermediate": ["intermediate_size"],
        },
        "section": "text_config",
    }
    architecture = Architecture(table, {})
    assert architecture.read_config({"text_config": GPT_OSS}).hidden == 8
    for config in (GPT_OSS, {"text_config": [GPT_OSS]}):
        with pytest.raises(CheckpointError, match=r"text_config is .*an object there"):
            architecture.read_config(config)


DEEPSEEK_OCR2 = {
    "architectures": ["DeepseekOCR2ForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "hidden_size": 1280,
    "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "kv_lora_rank": None,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 10,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 12,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "use_mla": False,
    },
    "projector_config": {"input_dim": 896, "model_type": "mlp_projector", "n_embed": 1280},
}


def test_deepseek_ocr2_as_released_keeps_its_sizes_in_language_config():
    architecture = find_architecture(DEEPSEEK_OCR2)
    moe = architecture.read_config(DEEPSEEK_OCR2)
    assert (moe.experts, moe.top_k, moe.hidden, moe.intermediate) == (64, 6, 1280, 896)
    assert moe.sparse_layers == tuple(range(1, 12))
    assert moe.act_fn.name == "silu"
    vision = ("model.sam_model.blocks.0.attn.qkv.weight", "model.qwen2_model.query_768.weight")
    assert {architecture.classify(name).role for name in vision} == {"vision"}


def flat(saved):
    """config.json of a Qwen3.5 with vision, as pruned community models have it."""
    config = saved.checkpoint.config
    return {**config["text_config"], "model_type": "qwen3_5_moe_text"}


def test_a_flat_qwen3_5_config_is_taken_with_names_of_the_vision_model(save):
    saved = save("qwen3_5_moe")
    model = read_model(flat(saved), saved.checkpoint.tensors)
    assert model.architecture.name == "qwen3_5_moe"
    assert model.moe == read_model(saved.checkpoint.config, saved.checkpoint.tensors).moe
    assert (
        model.roles.keys()
        == read_model(saved.checkpoint.config, saved.checkpoint.tensors).roles.keys()
    )
    text = save("qwen3_5_moe_text").checkpoint
    assert read_model(text.config, text.tensors).architecture.name == "qwen3_5_moe_text"


def test_names_of_both_qwen3_5_releases_leave_a_doubt_and_are_refused(save):
    tensors = save("qwen3_5_moe").checkpoint.tensors | save("qwen3_5_moe_text").checkpoint.tensors
    with pytest.raises(UnsupportedError, match="looks like an expert"):
        read_model(flat(save("qwen3_5_moe")), tensors)


@pytest.mark.parametrize("names", [(), ["lm_head.weight"]])
def test_names_that_say_nothing_leave_the_usual_architecture(names):
    config = {"model_type": "qwen3_5_moe_text"}
    assert find_architecture(config, names=names).name == "qwen3_5_moe_text"
