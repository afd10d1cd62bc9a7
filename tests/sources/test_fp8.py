"""Sources in FP8 blocks, as DeepSeek-V3, Qwen3 FP8, MiniMax-M2 and Kimi-K2 were released."""

from __future__ import annotations

import json
import re

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from moequant.cli import cli
from moequant.conversion import Recipe, convert, shipped_recipes
from moequant.dialects import find_dialect
from moequant.errors import CheckpointError, NonFiniteError, RecipeError, UnsupportedError
from moequant.formats import get_format
from moequant.progress import SilentProgress
from moequant.runtime import load_experts
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

MODELS = ["qwen3_moe", "deepseek_v3"]
EXPERT = "model.layers.1.mlp.experts.1"
ATTENTION = "model.layers.0.self_attn.o_proj"
SCALES = [
    pytest.param({}, id="powers of two"),
    pytest.param({"power_of_two": False}, id="free scales"),
    pytest.param({"scale_dtype": torch.float8_e8m0fnu}, id="E8M0"),
]

every_model = pytest.mark.parametrize("model_type", MODELS)


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(found, wanted):
    return found.dtype == wanted.dtype and torch.equal(raw(found), raw(wanted))


def by_role(errors):
    return {error.role: error for error in errors}


@every_model
@pytest.mark.parametrize("settings", SCALES)
def test_bf16_gives_every_number_back(
    make_fp8, read_tensors, config_of, tmp_path, model_type, settings
):
    source = make_fp8(model_type, **settings)
    out = tmp_path / "out"
    result = convert(source.path, out, format="bf16")
    found = read_tensors(out)
    assert found.keys() == source.numbers.keys() | source.plain.keys()
    exact = settings.get("power_of_two", True)
    for name, numbers in source.numbers.items():
        assert found[name].dtype == torch.bfloat16
        # An E4M3 number times a power of two has four significant bits, bfloat16 eight. Times any
        # float32, engines round the product to float32, then that to bfloat16.
        wanted = numbers if exact else numbers.float().bfloat16().double()
        assert torch.equal(found[name].double(), wanted), name
    for name, tensor in source.plain.items():
        assert same(found[name], tensor), name
    assert "quantization_config" not in config_of(out)
    for error in result.requantization_errors:
        assert (error.source, error.format) == ("fp8_block", "bf16")
        # Rounding to eight significant bits.
        assert (error.exact == error.weights) if exact else 0 < error.relative_error <= 2.0**-8
    assert sum(error.weights for error in result.requantization_errors) == len(source.numbers)
    report = verify(out, against=source.path)
    assert report.ok, report.problems
    assert report.requantization_errors == result.requantization_errors


@every_model
def test_what_bf16_gives_back_is_what_transformers_decodes(make_fp8, tmp_path, model_type):
    source = make_fp8(model_type, config={"num_nextn_predict_layers": 0}, power_of_two=False)
    convert(source.path, tmp_path / "out", format="bf16")
    states = []
    for path in (source.path, tmp_path / "out"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["mismatched_keys"]
        states.append(model.state_dict())
    decoded, plain = states
    assert decoded.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(decoded[name].bfloat16(), tensor.bfloat16()), name


@every_model
@pytest.mark.parametrize("settings", SCALES)
def test_experts_are_quantized_from_every_bit_of_the_source(
    make_fp8, read_tensors, config_of, tmp_path, model_type, settings
):
    source = make_fp8(model_type, **settings)
    out = tmp_path / "out"
    result = convert(source.path, out, format="nvfp4")
    converted = ConvertedCheckpoint.open(out)
    names = [f"{EXPERT}.{leaf}.weight" for leaf in ("gate_proj", "up_proj")]
    wanted = get_format("nvfp4").quantize_fused(
        [source.numbers[name].float() for name in names], names=names
    )
    for name, q in zip(names, wanted, strict=True):
        found = converted.read(name.removesuffix(".weight"))
        assert torch.equal(found.qdata, q.qdata)
        assert same(found.scale, q.scale)
        assert torch.equal(found.global_scale, q.global_scale)
    # compressed-tensors has no scale_inv; attention is BF16 there, and config.json says so.
    found = read_tensors(out)
    assert not any(name.endswith("weight_scale_inv") for name in found)
    assert found[f"{ATTENTION}.weight"].dtype == torch.bfloat16
    assert ATTENTION in config_of(out)["quantization_config"]["ignore"]
    assert any("they become BF16" in warning for warning in result.plan.warnings)
    errors = by_role(result.requantization_errors)
    assert errors["routed_experts"].exact == 0
    exact = settings.get("power_of_two", True)
    assert (errors["attention"].exact == errors["attention"].weights) is exact
    report = verify(out, against=source.path)
    assert report.ok, report.problems


MINIMAX_M2 = {
    "fmt": "float8_e4m3fn",
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
"""Where the quantization_config of MiniMax-M2 differs from DeepSeek-V3's."""


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_the_quantization_config_of_minimax_m2_is_read(make_fp8, read_tensors, tmp_path, format):
    source = make_fp8("qwen3_moe", config=MINIMAX_M2)
    result = convert(source.path, tmp_path / "out", format=format)
    assert all(error.exact == error.weights for error in result.requantization_errors)
    found = read_tensors(tmp_path / "out")
    if format == "bf16":
        assert all(torch.equal(found[n].double(), w) for n, w in source.numbers.items())
    else:
        before = read_tensors(source.path)
        assert found.keys() == before.keys()
        assert all(same(found[name], tensor) for name, tensor in before.items())


@every_model
@pytest.mark.parametrize("settings", SCALES[:2])
def test_in_their_own_format_and_dialect_all_weights_stay_bit_for_bit(
    make_fp8, read_tensors, config_of, tmp_path, model_type, settings
):
    source = make_fp8(model_type, **settings)
    out = tmp_path / "out"
    result = convert(source.path, out, format="fp8_block")
    assert all(error.exact == error.weights for error in result.requantization_errors)
    before, after = read_tensors(source.path), read_tensors(out)
    assert after.keys() == before.keys()
    assert all(same(after[name], tensor) for name, tensor in before.items())
    kept = config_of(out)["quantization_config"]["modules_to_not_convert"]
    assert ATTENTION not in kept
    assert "lm_head" in kept
    report = verify(out, against=source.path)
    assert report.ok, report.problems


@pytest.mark.parametrize(
    ("scale_dtype", "dialect"),
    [(torch.float32, "fp8"), (torch.float8_e8m0fnu, "fp8-ue8m0")],
    ids=["DeepSeek-V3.1", "E8M0"],
)
def test_what_says_ue8m0_stays_bit_for_bit_in_the_dialect_with_its_dtype_of_scales(
    make_fp8, read_tensors, tmp_path, scale_dtype, dialect
):
    source = make_fp8("deepseek_v3", config={"scale_fmt": "ue8m0"}, scale_dtype=scale_dtype)
    out = tmp_path / "out"
    result = convert(source.path, out, format="fp8_block", dialect=dialect)
    assert all(error.exact == error.weights for error in result.requantization_errors)
    before, after = read_tensors(source.path), read_tensors(out)
    assert after.keys() == before.keys()
    assert all(same(after[name], tensor) for name, tensor in before.items())
    report = verify(out, against=source.path)
    assert report.ok, report.problems


def test_scales_that_no_e8m0_holds_stop_the_conversion_with_what_to_do(make_fp8, tmp_path):
    source = make_fp8("qwen3_moe", power_of_two=False)
    with pytest.raises(UnsupportedError, match=r"no power of two.*choose the dialect fp8"):
        convert(source.path, tmp_path / "out", format="fp8_block", dialect="fp8-ue8m0")


def test_e8m0_scales_of_kept_layers_are_not_left_under_a_config_that_says_fp32(
    make_fp8, read_tensors, config_of, tmp_path
):
    source = make_fp8("qwen3_moe", scale_dtype=torch.float8_e8m0fnu)
    result = convert(source.path, tmp_path / "out", format="fp8_block")
    assert all(error.exact == error.weights for error in result.requantization_errors)
    found = read_tensors(tmp_path / "out")
    assert found[f"{EXPERT}.down_proj.weight_scale_inv"].dtype == torch.float32
    assert found[f"{ATTENTION}.weight"].dtype == torch.bfloat16
    assert ATTENTION in config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]


def test_a_rule_keeps_attention_quantized_in_another_dialect(make_fp8, read_tensors, tmp_path):
    source = make_fp8("qwen3_moe")
    rules = [
        {"roles": ["attention"], "format": "fp8_block"},
        {"roles": ["routed_experts"], "format": "mxfp4"},
    ]
    result = convert(source.path, tmp_path / "out", recipe=Recipe.model_validate({"rules": rules}))
    errors = by_role(result.requantization_errors)
    assert errors["attention"].exact == errors["attention"].weights
    before, after = read_tensors(source.path), read_tensors(tmp_path / "out")
    assert same(after[f"{ATTENTION}.weight"], before[f"{ATTENTION}.weight"])
    scale = before[f"{ATTENTION}.weight_scale_inv"]
    assert same(after[f"{ATTENTION}.weight_scale"], scale)
    assert verify(tmp_path / "out", against=source.path).ok


RECIPE_OF_THE_DOCS = [
    {"roles": ["attention", "shared_experts", "dense_mlp"], "format": "fp8_block"},
    {"roles": ["routed_experts"], "format": "nvfp4"},
]


@pytest.mark.parametrize("recipe", ["keep", "fp8_block", "deepseek-v3-nvfp4-experts"])
def test_the_recipe_of_the_docs_keeps_the_attention_of_deepseek_v3_in_fp8(
    make_fp8, by_hand, edit, read_tensors, tmp_path, recipe
):
    """With the 576 rows of `kv_a_proj_with_mqa`, which engines merge with `q_a_proj`."""
    source = make_fp8("deepseek_v3", path=tmp_path / "source").path
    generator = torch.Generator().manual_seed(0)
    merged = {}
    for layer in range(3):
        shapes = {"q_a_proj": (128, 256), "kv_a_proj_with_mqa": (576, 256), "kv_b_proj": (256, 512)}
        for leaf, shape in shapes.items():
            encoded = by_hand.fp8_block(shape, generator)
            module = f"model.layers.{layer}.self_attn.{leaf}"
            merged |= {f"{module}.{suffix}": t for suffix, t in encoded.tensors.items()}
    edit(source, {n: t for n, t in merged.items() if "q_a_proj" in n}, new=True)
    edit(source, {n: t for n, t in merged.items() if "q_a_proj" not in n})
    if recipe not in shipped_recipes():
        rules = [RECIPE_OF_THE_DOCS[0] | {"format": recipe}, RECIPE_OF_THE_DOCS[1]]
        recipe = Recipe.model_validate({"rules": rules})
    result = convert(source, tmp_path / "out", recipe=recipe)
    errors = by_role(result.requantization_errors)
    for role in ("attention", "shared_experts", "dense_mlp"):
        assert errors[role].exact == errors[role].weights
    after = read_tensors(tmp_path / "out")
    for name, tensor in merged.items():
        assert same(after[name.replace("weight_scale_inv", "weight_scale")], tensor)
    assert verify(tmp_path / "out", against=source).ok


KEEP = [
    {"roles": ["attention"], "format": "keep"},
    {"roles": ["routed_experts"], "layers": "0", "format": "keep"},
    {"roles": ["routed_experts"], "format": "nvfp4"},
]


@pytest.mark.parametrize("settings", SCALES)
def test_keep_leaves_quantized_weights_quantized_in_another_dialect(
    make_fp8, read_tensors, config_of, tmp_path, settings
):
    source = make_fp8("qwen3_moe", **settings)
    recipe = Recipe.model_validate({"rules": KEEP})
    result = convert(source.path, tmp_path / "out", recipe=recipe)
    assert result.plan.dialect.name == "compressed-tensors"
    assert not any("dequantized" in warning for warning in result.plan.warnings)
    before, after = read_tensors(source.path), read_tensors(tmp_path / "out")
    for module in (ATTENTION, "model.layers.0.mlp.experts.1.up_proj"):
        assert same(after[f"{module}.weight"], before[f"{module}.weight"])
        scale = before[f"{module}.weight_scale_inv"].float()
        assert torch.equal(after[f"{module}.weight_scale"], scale)
        config = config_of(tmp_path / "out")["quantization_config"]
        assert find_dialect(config).reader(config)(module) == "fp8_block"
    kept = [e for e in result.requantization_errors if e.format == "fp8_block"]
    assert {e.role for e in kept} == {"attention", "routed_experts"}
    assert all(error.exact == error.weights for error in kept)
    assert verify(tmp_path / "out", against=source.path).ok


def test_keep_leaves_numbers_of_e8m0_scales_exact(make_fp8, read_tensors, tmp_path):
    source = make_fp8("qwen3_moe", scale_dtype=torch.float8_e8m0fnu)
    rules = [{"roles": ["attention"], "format": "keep"}]
    rules += [{"roles": ["routed_experts"], "format": "fp8_block"}]
    result = convert(source.path, tmp_path / "out", recipe=Recipe.model_validate({"rules": rules}))
    after = read_tensors(tmp_path / "out")
    assert after[f"{ATTENTION}.weight"].dtype == torch.float8_e4m3fn
    assert all(error.exact == error.weights for error in result.requantization_errors)
    assert verify(tmp_path / "out", against=source.path).ok


def test_keep_of_a_part_of_what_engines_merge_is_refused(make_fp8, tmp_path):
    source = make_fp8("qwen3_moe")
    rules = [{"match": r".*\.q_proj\.weight", "format": "keep"}, KEEP[2]]
    with pytest.raises(RecipeError, match=r"q_proj.* stay quantized and .*k_proj.* merge them"):
        convert(source.path, tmp_path / "out", recipe=Recipe.model_validate({"rules": rules}))


def test_rows_that_do_not_fill_a_block_are_refused_where_engines_add_more(
    make_fp8, by_hand, edit, tmp_path
):
    source = make_fp8("qwen3_moe", path=tmp_path / "source").path
    encoded = by_hand.fp8_block((192, 256), torch.Generator().manual_seed(0)).tensors
    module = "model.layers.0.self_attn.{}_proj.{}"
    recipe = Recipe.model_validate({"rules": RECIPE_OF_THE_DOCS})
    edit(source, {module.format("v", suffix): t for suffix, t in encoded.items()})
    convert(source, tmp_path / "out", recipe=recipe)
    edit(source, {module.format("k", suffix): t for suffix, t in encoded.items()})
    with pytest.raises(UnsupportedError, match=r"k_proj: N = 192 .* merge with a following one"):
        convert(source, tmp_path / "other", recipe=recipe)


def test_a_rule_gives_a_part_back_and_leaves_the_rest(make_fp8, read_tensors, config_of, tmp_path):
    source = make_fp8("qwen3_moe")
    recipe = Recipe.model_validate({"rules": [{"roles": ["attention"], "format": "bf16"}]})
    result = convert(source.path, tmp_path / "out", recipe=recipe)
    assert result.plan.dialect.name == "fp8"
    found = read_tensors(tmp_path / "out")
    assert torch.equal(found[f"{ATTENTION}.weight"].double(), source.numbers[f"{ATTENTION}.weight"])
    assert ATTENTION in config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert same(
        found[f"{EXPERT}.up_proj.weight_scale_inv"],
        read_tensors(source.path)[f"{EXPERT}.up_proj.weight_scale_inv"],
    )
    assert verify(tmp_path / "out", against=source.path).ok


def test_named_options_quantize_anew(make_fp8, tmp_path):
    source = make_fp8("qwen3_moe", power_of_two=False)
    rule = {
        "roles": ["routed_experts"],
        "format": "fp8_block",
        "options": {"scale": "power_of_two"},
    }
    result = convert(source.path, tmp_path / "out", recipe=Recipe.model_validate({"rules": [rule]}))
    (error,) = result.requantization_errors
    assert error.exact == 0
    scale = ConvertedCheckpoint.open(tmp_path / "out").read(f"{EXPERT}.down_proj").scale
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


def test_ragged_blocks_are_decoded_by_the_block_and_not_by_even_shares(
    make_fp8, read_tensors, tmp_path
):
    source = make_fp8("qwen3_moe", intermediate=192)
    convert(source.path, tmp_path / "out", format="bf16")
    found = read_tensors(tmp_path / "out")
    for name, numbers in source.numbers.items():
        assert torch.equal(found[name].double(), numbers), name
    with pytest.raises(UnsupportedError, match="192 is not a multiple of 128"):
        convert(source.path, tmp_path / "fp8", format="fp8_block")


def test_a_flipped_bit_of_what_was_given_back_is_found(make_fp8, edit, read_tensors, tmp_path):
    source = make_fp8("qwen3_moe")
    out = tmp_path / "out"
    convert(source.path, out, format="bf16", max_shard_size="200KB")
    name = f"{EXPERT}.up_proj.weight"
    w = read_tensors(out)[name]
    w.view(torch.int16)[3, 5] ^= 1
    edit(out, {name: w})
    problems = verify(out, against=source.path).problems
    assert any(p.name == name and "element [3, 5]" in p.message for p in problems)


def test_a_result_without_record_is_compared_too(make_fp8, tmp_path):
    source = make_fp8("deepseek_v3")
    for format in ("bf16", "nvfp4", "fp8_block"):
        out = tmp_path / format
        convert(source.path, out, format=format)
        (out / "moequant.json").unlink()
        report = verify(out, against=source.path)
        assert report.ok, report.problems
        assert report.method == "bounds"
        others = [name for name in source.numbers if ".experts." not in name]
        dequantized = {"bf16": len(source.numbers), "nvfp4": len(others), "fp8_block": 0}
        assert report.counts["dequantized"] == dequantized[format]


BAD = {
    "a missing scale": ({f"{EXPERT}.up_proj.weight_scale_inv": None}, UnsupportedError, "F8_E4M3"),
    "missing codes": ({f"{EXPERT}.up_proj.weight": None}, CheckpointError, "is missing"),
    "a scale of another shape": (
        {f"{EXPERT}.up_proj.weight_scale_inv": torch.ones(3, 2)},
        CheckpointError,
        r"up_proj\.weight_scale_inv: shape \[3, 2\], not \[2, 2\]",
    ),
    "codes of another dtype": (
        {f"{EXPERT}.up_proj.weight": torch.ones(256, 256, dtype=torch.int8)},
        CheckpointError,
        "int8, not float8_e4m3fn",
    ),
    "codes that are NaN": (
        {
            f"{EXPERT}.up_proj.weight": torch.full((256, 256), 0x7F, dtype=torch.uint8).view(
                torch.float8_e4m3fn
            )
        },
        NonFiniteError,
        r"up_proj\.weight: nan at index \[0, 0\]",
    ),
    "a scale that is infinite": (
        {f"{ATTENTION}.weight_scale_inv": torch.full((2, 2), torch.inf)},
        NonFiniteError,
        r"o_proj\.weight: ",
    ),
}


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "fp8_block"])
@pytest.mark.parametrize("case", BAD)
def test_a_damaged_source_is_refused_by_name(make_fp8, edit, tmp_path, case, format):
    tensors, error, message = BAD[case]
    source = make_fp8("qwen3_moe", path=tmp_path / "source")
    edit(source.path, tensors)
    if format == "fp8_block" and ATTENTION in next(iter(tensors)):
        return  # copied bit for bit, as plain weights are
    with pytest.raises(error, match=message) as raised:
        convert(source.path, tmp_path / "out", format=format)
    if error is NonFiniteError:
        assert re.search(
            r"It is in \S+\.weight of \S+\.safetensors and \S+\.weight_scale_inv of \S+$",
            str(raised.value),
        )
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_config_that_contradicts_the_tensors_is_refused(make_fp8, config_of, tmp_path):
    source = make_fp8("qwen3_moe", path=tmp_path / "source")
    config = config_of(source.path)
    path = source.path / "config.json"
    config["quantization_config"]["modules_to_not_convert"] = [ATTENTION]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale_inv.*module is not quantized"):
        convert(source.path, tmp_path / "out", format="bf16")
    config["quantization_config"] = FP8_OF_OTHERS
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"weight_block_size is \[64, 64\]"):
        convert(source.path, tmp_path / "out", format="bf16")
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no quantization_config"):
        convert(source.path, tmp_path / "out", format="bf16")


FP8_OF_OTHERS = {
    "quant_method": "fp8",
    "weight_block_size": [64, 64],
    "activation_scheme": "static",
}


def test_bf16_of_a_plain_source_is_refused(make_checkpoint, tmp_path):
    with pytest.raises(RecipeError, match="this checkpoint has no quantized ones"):
        convert(make_checkpoint(), tmp_path / "out", format="bf16")


def test_bf16_has_no_dialect(make_fp8, tmp_path):
    with pytest.raises(RecipeError, match="remove the dialect"):
        convert(make_fp8("qwen3_moe").path, tmp_path / "out", format="bf16", dialect="fp8")


def test_engines_merge_gate_and_up_so_they_are_given_back_together(make_fp8, tmp_path):
    rule = {"match": r".*\.q_proj\.weight", "format": "bf16"}
    with pytest.raises(RecipeError, match="engines merge them"):
        convert(
            make_fp8("qwen3_moe").path,
            tmp_path / "out",
            recipe=Recipe.model_validate({"rules": [rule]}),
        )


def test_the_command_says_what_is_exact(make_fp8, tmp_path):
    source = str(make_fp8("qwen3_moe", power_of_two=False).path)
    arguments = ["convert", source, str(tmp_path / "out"), "--format", "bf16"]
    plan = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert plan.exit_code == 0
    assert "bf16" in plan.stdout
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert "routed_experts   fp8_block   bf16" in result.stdout
    record = json.loads((tmp_path / "out" / "moequant.json").read_text())
    assert [error["role"] for error in record["requantization_errors"]] == [
        "routed_experts",
        "attention",
    ]
    checked = CliRunner().invoke(cli, ["verify", str(tmp_path / "out"), "--against", source])
    assert checked.exit_code == 0
    assert "dequantized to BF16" in checked.stdout


def test_transformers_loads_kept_fp8_layers_as_it_loads_the_source(make_fp8, tmp_path):
    source = make_fp8("qwen3_moe", power_of_two=False)
    convert(source.path, tmp_path / "out", format="fp8_block")
    states = []
    for path in (source.path, tmp_path / "out"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(report.values()), report
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_a_conversion_that_goes_on_knows_what_the_first_part_lost(make_fp8, tmp_path):
    class Stop(SilentProgress):
        def __init__(self, items):
            self.left = items

        def advance(self, done, current):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    source = make_fp8("qwen3_moe", power_of_two=False)
    settings = {"format": "nvfp4", "max_shard_size": "200KB", "workers": 1}
    whole = convert(source.path, tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        convert(source.path, tmp_path / "out", **settings, progress=Stop(20))
    result = convert(source.path, tmp_path / "out", **settings)
    assert result.resumed_shards > 0
    assert result.requantization_errors == whole.requantization_errors
    records = [(tmp_path / name / "moequant.json").read_text() for name in ("whole", "out")]
    assert (
        json.loads(records[0])["requantization_errors"]
        == json.loads(records[1])["requantization_errors"]
    )


def test_a_config_that_names_the_experts_dtype_is_not_taken_for_deepseek_v4(make_fp8, tmp_path):
    source = make_fp8("qwen3_moe", config={"expert_dtype": "fp8"})
    result = convert(source.path, tmp_path / "out", format="fp8_block")
    assert result.plan.source.dialect.name == "fp8"


def test_the_quantization_config_may_stand_in_the_text_config(
    make_fp8, config_of, read_tensors, tmp_path
):
    source = make_fp8("qwen3_moe", path=tmp_path / "source")
    config = config_of(source.path)
    config["text_config"] = {"quantization_config": config.pop("quantization_config")}
    (source.path / "config.json").write_text(json.dumps(config))
    convert(source.path, tmp_path / "out", format="bf16")
    assert config_of(tmp_path / "out")["text_config"] == {}
    name = f"{EXPERT}.up_proj.weight"
    assert torch.equal(read_tensors(tmp_path / "out")[name].double(), source.numbers[name])


def test_experts_whose_activations_have_static_scales_are_not_loaded(
    make_fp8, make_form, config_of, tmp_path
):
    """Run as if they had none, they would compute something else: no word of a scale is lost."""
    fp8 = make_fp8("qwen3_moe", config={"activation_scheme": "static"})
    with pytest.raises(UnsupportedError, match="activation_scheme is 'static', but moequant"):
        load_experts(fp8.path, 0)
    form = make_form("pack-quantized, W4AFP8", path=tmp_path / "form")
    config = config_of(form.path)
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    (form.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError, match=r"input_activations.strategy is 'tensor' and not 'token', unlike"
    ):
        load_experts(form.path, 0)
