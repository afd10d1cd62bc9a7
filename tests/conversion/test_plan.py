"""The plan, from headers alone: no file exists in these tests."""

from __future__ import annotations

import json
import re

import pytest
import torch

from moequant.conversion.plan import make_plan
from moequant.conversion.recipe import Recipe, Rule
from moequant.conversion.units import Copy
from moequant.errors import CheckpointError, RecipeError, UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.formats.base import WHOLE
from moequant.storage.checkpoint import natural_key
from moequant.storage.headers import DTYPE_BITS, TensorInfo

E, H, I, LAYERS = 3, 256, 384, 11
CONFIG = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_hidden_layers": LAYERS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "hidden_act": "silu",
}


def shapes(intermediate=I):
    """Name and shape of every tensor of the model CONFIG speaks of."""
    yield "model.embed_tokens.weight", (64, H)
    yield "model.norm.weight", (H,)
    yield "lm_head.weight", (64, H)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (H,)
        yield f"{at}.self_attn.q_proj.weight", (H, H)
        yield f"{at}.self_attn.q_proj.bias", (H,)
        yield f"{at}.self_attn.k_proj.weight", (128, H)
        if layer == 0:
            for leaf in ("gate_proj", "up_proj"):
                yield f"{at}.mlp.{leaf}.weight", (512, H)
            yield f"{at}.mlp.down_proj.weight", (H, 512)
            continue
        yield f"{at}.mlp.gate.weight", (E, H)
        yield f"{at}.mlp.shared_expert_gate.weight", (1, H)
        for parent in (f"{at}.mlp.shared_expert", *(f"{at}.mlp.experts.{e}" for e in range(E))):
            yield f"{parent}.gate_proj.weight", (intermediate, H)
            yield f"{parent}.up_proj.weight", (intermediate, H)
            yield f"{parent}.down_proj.weight", (H, intermediate)


def headers(dtype="BF16", **kwargs):
    infos, start = {}, 1000
    for name, shape in sorted(shapes(**kwargs), key=lambda item: natural_key(item[0])):
        elements = 1
        for extent in shape:
            elements *= extent
        stop = start + elements * DTYPE_BITS[dtype] // 8
        infos[name] = TensorInfo(
            name=name, dtype=dtype, shape=shape, file="model.safetensors", start=start, stop=stop
        )
        start = stop
    return infos


def plan(recipe="fp8_block", *, tensors=None, config=None, dialect=None, max_shard_bytes=10**9):
    tensors = headers() if tensors is None else tensors
    recipe = Recipe.for_format(recipe) if isinstance(recipe, str) else recipe
    recipe = recipe.with_output(dialect=dialect, max_shard_size=f"{max_shard_bytes}B")
    return make_plan(
        tensors, CONFIG if config is None else config, {"model.safetensors": 10**9}, recipe
    )


def experts_named(planned):
    return {weight.info.name for unit in planned.units for weight in unit.weights}


def routed():
    return {name for name, _ in shapes() if ".experts." in name}


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_format_converts_the_routed_experts_and_nothing_else(format):
    planned = plan(format)
    assert experts_named(planned) == routed()
    copied = {copy.info.name for copy in planned.copies}
    assert copied == {name for name, _ in shapes()} - routed()


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_gate_and_up_of_an_expert_are_one_unit_and_down_another(format):
    leaves = [
        tuple(w.module.rpartition(".")[2] for w in unit.weights) for unit in plan(format).units
    ]
    assert set(leaves) == {("gate_proj", "up_proj"), ("down_proj",)}
    assert len(leaves) == 2 * E * (LAYERS - 1)


@pytest.mark.parametrize("format", CONVERTIBLE)
@pytest.mark.parametrize("max_shard_bytes", [1, 300_000, 10**9])
def test_units_stay_in_one_shard_and_shards_within_their_limit(format, max_shard_bytes):
    planned = plan(format, max_shard_bytes=max_shard_bytes)
    seen = []
    for shard in planned.shards:
        data_bytes = sum(slot.size_bytes for slot in shard.slots.values())
        assert data_bytes <= max_shard_bytes or len(shard.items) == 1
        assert shard.size_bytes == len(shard.header) + data_bytes
        seen += list(shard.slots)
    assert len(seen) == len(set(seen))
    for unit in planned.units:
        homes = {
            shard.file
            for shard in planned.shards
            for weight in unit.weights
            if any(name.rpartition(".")[0] == weight.module for name in shard.slots)
        }
        assert len(homes) == 1
    index = planned.index()
    assert sorted(index["weight_map"]) == sorted(seen)
    assert index["metadata"]["total_size"] == sum(
        slot.size_bytes for shard in planned.shards for slot in shard.slots.values()
    )


def test_shards_are_numbered_in_natural_order():
    planned = plan(max_shard_bytes=300_000)
    count = len(planned.shards)
    assert [s.file for s in planned.shards] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    order = [item.name for item in planned.items]
    assert order == sorted(order, key=natural_key)
    assert order.index("model.layers.2.mlp.gate.weight") < order.index(
        "model.layers.10.mlp.gate.weight"
    )


def test_every_two_dimensional_module_is_converted_or_listed_as_kept():
    config = plan("fp8_block").quantization_config
    kept = set(config["modules_to_not_convert"])
    modules = {
        name.removesuffix(".weight")
        for name, shape in shapes()
        if len(shape) == 2 and name.endswith(".weight")
    }
    assert modules - {name.removesuffix(".weight") for name in routed()} <= kept
    assert not kept & {name.removesuffix(".weight") for name in routed()}


def test_the_same_inputs_give_the_same_digest_and_others_another():
    digest = plan().digest
    assert plan().digest == digest
    others = [
        plan("mxfp4"),
        plan(max_shard_bytes=300_000),
        plan(tensors=headers("F16")),
        plan(
            Recipe(
                rules=(
                    Rule(
                        roles=("routed_experts",), format="fp8_block", options={"scale": "float32"}
                    ),
                )
            )
        ),
        plan(dialect="compressed-tensors"),
    ]
    digests = {other.digest for other in others} | {digest}
    assert len(digests) == len(others) + 1


def test_the_same_work_spelled_otherwise_has_the_same_digest():
    spelled = Recipe(
        summary="Said differently.",
        rules=(
            Rule(
                match=r".*\.experts\.\d+\..*",
                format="fp8_block",
                options={"scale": "power_of_two"},
            ),
        ),
    )
    assert plan(spelled).digest == plan().digest


def test_equal_options_spelled_otherwise_do_not_split_a_fused_set():
    default = {"global_scale": "power_of_two"}
    rules = (
        Rule(match=r".*experts\.\d+\.gate_proj.*", format="nvfp4", options=default),
        Rule(roles=("routed_experts",), format="nvfp4"),
    )
    assert {len(unit.weights) for unit in plan(Recipe(rules=rules)).units} == {1, 2}


def test_roles_layers_and_options_choose_what_a_recipe_converts():
    recipe = Recipe(
        rules=(
            Rule(roles=("routed_experts", "shared_experts"), layers="2:4", format="mxfp4"),
            Rule(match=r"model\.layers\.5\..*experts.*", format="mxfp4"),
        )
    )
    layers = {name.split(".")[2] for name in experts_named(plan(recipe))}
    assert layers == {"2", "3", "5"}
    names = experts_named(plan(recipe))
    assert "model.layers.2.mlp.shared_expert.gate_proj.weight" in names
    assert "model.layers.2.mlp.shared_expert_gate.weight" not in names


def test_attention_projections_that_engines_merge_are_one_unit():
    recipe = Recipe(rules=(Rule(roles=("attention",), format="fp8_block"),))
    units = [tuple(w.module.rpartition(".")[2] for w in u.weights) for u in plan(recipe).units]
    assert set(units) == {("k_proj", "q_proj")}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((Rule(roles=("shared_experts",), layers="0", format="mxfp4"),), "converts nothing"),
        (
            (Rule(roles=("routed_experts",), layers="99", format="mxfp4"),),
            r"converts nothing .*; check roles, layers \(here 0 to 10\) and match, which",
        ),
        ((Rule(match=r".*experts\.0\..*", format="mxfp4"),), "must share a format"),
        ((Rule(match=r".*experts\.\d+\.gate_proj.*", format="mxfp4"),), "must share a format"),
        ((Rule(match=r".*shared_expert\.up_proj.*", format="mxfp4"),), "engines merge"),
        ((Rule(match=r".*q_proj.*", format="mxfp4"),), "engines merge"),
    ],
)
def test_a_recipe_that_splits_what_belongs_together_is_refused(rules, message):
    with pytest.raises(RecipeError, match=message):
        plan(Recipe(rules=rules))


def test_a_rule_without_effect_is_said():
    recipe = Recipe(
        rules=(
            Rule(roles=("routed_experts",), format="fp8_block"),
            Rule(roles=("dense_mlp",), layers="3", format="fp8_block"),
        )
    )
    assert any("rules[1] of the recipe" in warning for warning in plan(recipe).warnings)


def test_a_recipe_for_another_architecture_is_refused():
    rules = (Rule(roles=("routed_experts",), format="fp8_block"),)
    assert plan(Recipe(rules=rules, architectures=("Qwen2MoeForCausalLM",))).shards
    with pytest.raises(
        RecipeError, match=r"is for MixtralForCausalLM, .*; choose another recipe, or add"
    ):
        plan(Recipe(rules=rules, architectures=("MixtralForCausalLM",)))


@pytest.mark.parametrize("format", sorted(n for n, f in CONVERTIBLE.items() if f.block[1] != WHOLE))
def test_a_shape_the_format_or_dialect_cannot_hold_is_refused_before_anything_is_written(format):
    odd = 392  # neither a multiple of 16 nor of 128
    planned = plan(
        format, tensors=headers(intermediate=odd), config=CONFIG | {"moe_intermediate_size": odd}
    )
    assert not planned.shards
    assert planned.refusals
    assert planned.source_bytes > 0
    assert all(str(odd) in refusal for refusal in planned.refusals)
    assert any("more weights of this shape" in refusal for refusal in planned.refusals)


def test_a_dialect_that_cannot_hold_the_format_is_refused_in_one_line():
    recipe = Recipe.for_format("nvfp4").with_output(dialect="fp8", max_shard_size=None)
    (refusal,) = plan(recipe).refusals
    first, _, reason = refusal.partition(": ")
    assert first.endswith("experts.0.down_proj")
    assert "the dialect fp8 does not support nvfp4" in reason
    assert re.search(r"The same applies to \d+ more weights$", reason)


def test_a_quantized_source_is_refused_by_dtype():
    with pytest.raises(CheckpointError, match=r"F8_E4M3.*is quantized.*no quantization_config"):
        plan(tensors=headers("F8_E4M3"))
    assert any("F64" in refusal for refusal in plan(tensors=headers("F64")).refusals)


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [("weight", "F8_E4M3"), ("weight_scale_inv", "F32"), ("weight_packed", "I32"), ("x", "U8")],
)
def test_a_source_quantized_in_part_is_refused_by_name(leaf, dtype):
    tensors = headers()
    name = f"model.layers.3.self_attn.o_proj.{leaf}"
    norm = tensors["model.norm.weight"]
    tensors[name] = TensorInfo(
        name=name, dtype=dtype, shape=(1,), file=norm.file, start=norm.start, stop=norm.stop
    )
    with pytest.raises(CheckpointError, match=rf"o_proj\.{leaf}.*unquantized release"):
        plan(tensors=tensors)


def test_a_stale_quantization_config_is_said():
    planned = plan(config=CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert any("quantization_config" in warning for warning in planned.warnings)
    assert not any("quantization_config" in warning for warning in plan().warnings)


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({"torch_dtype": "float16"}, True),
        ({"dtype": "float16"}, True),
        ({"text_config": {"dtype": "float16"}, "dtype": "bfloat16"}, True),
        ({"torch_dtype": "bfloat16"}, False),
    ],
)
def test_w4a8_of_a_model_in_float16_warns_of_vllm(fields, warns):
    planned = plan("w4a8", config=CONFIG | fields)
    assert any("--dtype bfloat16" in warning for warning in planned.warnings) == warns


@pytest.mark.parametrize("classes", [[{}], [[]], "Qwen2MoeForCausalLM", None, [1, None]])
def test_hostile_class_names_do_no_harm(classes):
    assert plan(config=CONFIG | {"architectures": classes}).shards


def test_an_unknown_dialect_or_one_that_lacks_the_format_is_refused():
    with pytest.raises(RecipeError, match="unknown dialect"):
        plan(dialect="gguf")
    assert plan("nvfp4", dialect="fp8").refusals


def test_a_missing_tensor_is_an_error_and_not_a_refusal():
    tensors = headers()
    del tensors["model.layers.4.mlp.experts.1.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.4\.mlp\.experts\.1\.up_proj"):
        plan(tensors=tensors)


def test_sizes_add_up():
    planned = plan("fp8_block")
    assert planned.source_bytes == sum(info.size_bytes for info in headers().values())
    copied = sum(item.source_bytes for item in planned.items if isinstance(item, Copy))
    converted = sum(unit.source_bytes for unit in planned.units)
    scales = sum(
        slot.size_bytes
        for shard in planned.shards
        for name, slot in shard.slots.items()
        if name.endswith("weight_scale_inv")
    )
    data_bytes = planned.output_bytes - sum(len(shard.header) for shard in planned.shards)
    assert data_bytes == copied + converted // 2 + scales


def test_headers_are_valid_json_with_data_aligned_to_eight_bytes():
    for shard in plan("nvfp4").shards:
        length = int.from_bytes(shard.header[:8], "little")
        assert len(shard.header) == 8 + length
        assert len(shard.header) % 8 == 0
        assert set(json.loads(shard.header[8:])) - {"__metadata__"} == set(shard.slots)


def test_every_kind_of_job_is_named_once():
    tensors = headers()
    name = "model.layers.3.mlp.experts.1.down_proj.weight"
    tensors[name] = tensors[name]._replace(dtype="F16")
    options = {"global_scale": "power_of_two", "search": "none"}
    assert plan("nvfp4", tensors=tensors).jobs() == [
        (CONVERTIBLE["nvfp4"], options, torch.bfloat16),
        (CONVERTIBLE["nvfp4"], options, torch.float16),
    ]


@pytest.mark.parametrize(
    ("format", "named", "not_named"),
    [("mxfp4", "compressed-tensors", "fp8, which"), ("fp8_block", "fp8, which", "modelopt,")],
)
def test_a_dialect_that_will_not_do_is_answered_by_those_that_carry_the_format(
    format, named, not_named
):
    with pytest.raises(UnsupportedError, match="gpt-oss does not support qwen2_moe") as refused:
        plan(format, dialect="gpt-oss")
    _, choice = str(refused.value).split("Choose ")
    assert named in choice
    assert not_named not in choice
