"""Sources as compressed-tensors and Model-Optimizer write them, put together byte by byte."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoModelForCausalLM

from moequant.cli import cli
from moequant.conversion import Recipe, convert
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize
from moequant.runtime import load_experts
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

NAMES = [
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "float-quantized, blocks",
    "float-quantized, channels",
    "float-quantized, tensor",
    "pack-quantized, W4AFP8",
    "pack-quantized, W4A16",
    "pack-quantized, groups of 32",
    "int-quantized, W4AFP8",
    "fp8, experts in FP4",
    "fp8, one scale",
    "fp8, one scale by transformers' name",
    "modelopt",
    "modelopt, hf_quant_config.json",
    "modelopt, FP8",
    "modelopt, FP8 by row",
    "modelopt, FP8 blocks",
    "modelopt, MXFP8",
    "modelopt, mixed",
]
ROUNDING = 2.0**-8
"""Most that rounding to BF16, of eight significant bits, takes of a number."""
EXPERT = "model.layers.0.mlp.experts.1"

every_form = pytest.mark.parametrize("name", NAMES)


def test_every_form_is_here(forms):
    assert list(forms) == NAMES


@every_form
def test_bf16_gives_every_number_back(make_form, forms, read_tensors, config_of, tmp_path, name):
    source, form = make_form(name), forms[name]
    result = convert(source.path, tmp_path / "out", format="bf16")
    found = read_tensors(tmp_path / "out")
    assert found.keys() == source.numbers.keys() | source.plain.keys()
    for weight, numbers in source.numbers.items():
        wanted = numbers if "bf16" in form.exact else numbers.float().bfloat16().double()
        assert torch.equal(found[weight].double(), wanted), weight
    (error,) = result.requantization_errors
    assert (error.source, error.format) == (form.format, "bf16")
    if "bf16" in form.exact:
        assert error.exact == error.weights == len(source.numbers)
    else:
        assert 0 < error.relative_error <= ROUNDING
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    report = verify(tmp_path / "out", against=source.path)
    assert report.ok, report.problems


@pytest.mark.parametrize("format", CONVERTIBLE)
@every_form
def test_every_form_becomes_every_format(make_form, forms, tmp_path, name, format):
    source, form = make_form(name), forms[name]
    result = convert(source.path, tmp_path / "out", format=format)
    (error,) = result.requantization_errors
    assert (error.source, error.format) == (form.format, format)
    assert (error.exact == error.weights) is (format in form.exact)
    converted = ConvertedCheckpoint.open(tmp_path / "out")
    for weight, numbers in source.numbers.items():
        decoded = dequantize(converted.read(weight.removesuffix(".weight"))).double()
        if format in form.exact:
            # Codes times free FP32 scales are more than float32 holds, here and in the source.
            rounded = form.format in ("fp8_channel", "fp8_tensor")
            assert torch.equal(decoded, numbers.float().double() if rounded else numbers), weight
        else:
            # Codes drawn evenly are no normal weights: half a step of E2M1 or INT4 at most.
            assert torch.linalg.vector_norm(decoded - numbers) < 0.25 * numbers.norm()
    report = verify(tmp_path / "out", against=source.path)
    assert report.ok, report.problems
    assert report.requantization_errors == result.requantization_errors


PLAN_ALL = """
import sys
from moequant.conversion import convert
for source in sys.argv[1:]:
    convert(source, "not written", format="bf16", dry_run=True)
print(sorted({"sympy", "torch._dynamo"} & sys.modules.keys()))
"""


def test_a_plan_does_not_load_what_takes_torch_a_second(make_form):
    # Arithmetic on tensors without data loads torch's compiler: 1.2 CPU s, and 150 MB.
    paths = [str(make_form(name).path) for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", PLAN_ALL, *paths], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
@every_form
def test_the_reference_gives_the_same_files_and_errors(
    make_form, tmp_path, monkeypatch, name, format
):
    source = make_form(name)
    quick = convert(source.path, tmp_path / "native", format=format)
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    slow = convert(source.path, tmp_path / "torch", format=format)
    assert [share.name for share in (*quick.shares, *slow.shares)] == ["native", "torch"]
    assert quick.requantization_errors == slow.requantization_errors
    for file in (tmp_path / "torch").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "native" / file.name).read_bytes()


LIBRARY = [name for name in NAMES if "quantized" in name]


@pytest.mark.parametrize("name", LIBRARY)
def test_compressed_tensors_decodes_the_same(make_form, forms, read_tensors, tmp_path, name):
    source, form = make_form(name), forms[name]
    convert(source.path, tmp_path / "out", format="bf16")
    found, stored = read_tensors(tmp_path / "out"), read_tensors(source.path)
    scheme = QuantizationConfig.model_validate(form.config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    for weight in source.numbers:
        module = weight.removesuffix("weight")
        local = {n.removeprefix(module): t for n, t in stored.items() if n.startswith(module)}
        # In float32, for it multiplies in the dtype of the scale.
        local["weight_scale"] = as_float32(local["weight_scale"])
        decoded = compressor.decompress(local, scheme)["weight"]
        assert torch.equal(decoded.float().bfloat16(), found[weight]), weight


def as_float32(scale):
    return scale.float() if scale.dtype in (torch.bfloat16, torch.float16) else scale


@pytest.mark.parametrize(
    "name",
    [
        "mxfp4-pack-quantized",
        "pack-quantized, W4AFP8",
        "fp8, experts in FP4",
        "fp8, one scale by transformers' name",
    ],
)
def test_transformers_decodes_the_same(make_form, tmp_path, name):
    source = make_form(name)
    convert(source.path, tmp_path / "out", format="bf16")
    states = []
    for path in (source.path, tmp_path / "out"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(report.values()), report
        states.append(model.state_dict())
    for weight, tensor in states[1].items():
        assert torch.equal(states[0][weight], tensor), weight


def test_our_own_outputs_are_sources_and_come_back_the_same(
    make_checkpoint, read_tensors, tmp_path
):
    plain = make_checkpoint(experts=2, layers=1)
    for format in CONVERTIBLE:
        for dialect in (None, "compressed-tensors", "moequant"):
            at = tmp_path / f"{format}-{dialect}"
            there = convert(plain, at / "there", format=format, dialect=dialect).output
            back = convert(there, at / "bf16", format="bf16").output
            decoded = ConvertedCheckpoint.open(there)
            for name, tensor in read_tensors(back).items():
                if ".experts." in name:
                    q = decoded.read(name.removesuffix(".weight"))
                    assert torch.equal(tensor, dequantize(q).bfloat16())
            again = convert(there, at / "again", format=format, dialect=dialect).output
            before, after = read_tensors(there), read_tensors(again)
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                same = after[name].view(torch.uint8) if tensor.ndim else after[name]
                assert torch.equal(same, tensor.view(torch.uint8) if tensor.ndim else tensor)


def test_compressed_tensors_and_modelopt_hold_the_same_nvfp4(make_form, read_tensors, tmp_path):
    pair = [make_form("nvfp4-pack-quantized"), make_form("modelopt")]
    outputs = [
        convert(source.path, tmp_path / str(i), format="nvfp4").output
        for i, source in enumerate(pair)
    ]
    one, other = map(read_tensors, outputs)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "modelopt"])
def test_a_global_scale_that_is_no_power_of_two_is_rounded_and_the_report_says_so(
    make_form, read_tensors, tmp_path, name
):
    source = make_form(name, divisor=2688 / 0.37)
    result = convert(source.path, tmp_path / "out", format="bf16")
    found = read_tensors(tmp_path / "out")
    for weight, numbers in source.numbers.items():
        # One rounding to eight bits, and three to float32: of the reciprocal and of products.
        bound = numbers.abs() * (2.0**-8 + 4 * 2.0**-24)
        assert ((found[weight].double() - numbers).abs() <= bound).all()
    assert 0 < result.requantization_errors[0].relative_error <= ROUNDING


def test_gate_and_up_with_global_scales_of_their_own_get_one(
    make_form, edit, read_tensors, tmp_path
):
    source = make_form("nvfp4-pack-quantized", path=tmp_path / "source")
    stored = read_tensors(source.path)
    name = f"{EXPERT}.gate_proj"
    scale = stored[f"{name}.weight_scale"].float().clamp(2.0**-4, 64)
    edit(
        source.path,
        {
            f"{name}.weight_global_scale": torch.tensor([2.0**15]),
            f"{name}.weight_scale": scale.to(torch.float8_e4m3fn),
        },
    )
    result = convert(source.path, tmp_path / "out", format="nvfp4")
    (error,) = result.requantization_errors
    assert error.exact == error.weights
    found = read_tensors(tmp_path / "out")
    for leaf in ("gate_proj", "up_proj"):
        assert found[f"{EXPERT}.{leaf}.weight_global_scale"].item() == 2.0**13
    assert torch.equal(found[f"{name}.weight_scale"].float(), scale / 4)
    assert verify(tmp_path / "out", against=source.path).ok


def test_global_scales_that_cannot_be_one_are_quantized_anew(make_form, edit, tmp_path):
    source = make_form("nvfp4-pack-quantized", path=tmp_path / "source")
    edit(source.path, {f"{EXPERT}.gate_proj.weight_global_scale": torch.tensor([2.0**20])})
    result = convert(source.path, tmp_path / "out", format="nvfp4")
    (error,) = result.requantization_errors
    assert error.exact == error.weights - 2
    assert verify(tmp_path / "out", against=source.path).ok


def test_scales_of_activations_are_left_out_and_said(make_form, read_tensors, tmp_path):
    source = make_form("modelopt")
    result = convert(source.path, tmp_path / "out", format="nvfp4")
    assert any("calibrated scales" in warning for warning in result.plan.warnings)
    assert not any(name.endswith("input_scale") for name in read_tensors(tmp_path / "out"))


REFUSED = {
    "zero points": ("pack-quantized, W4A16", {"symmetric": False}, "symmetric is False"),
    "eight bits": ("pack-quantized, W4A16", {"num_bits": 8}, "num_bits is 8"),
    "groups in another order": ("pack-quantized, W4A16", {"actorder": "group"}, "actorder"),
    "blocks of another size": (
        "float-quantized, blocks",
        {"block_structure": [64, 64]},
        r"block_structure is \[64, 64\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_schemes_are_refused_by_field(make_form, config_of, tmp_path, case):
    name, change, message = REFUSED[case]
    source = make_form(name, path=tmp_path / "source")
    config = config_of(source.path)
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (source.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        convert(source.path, tmp_path / "out", format="bf16")


# Experts are [256, 256]: 8 groups of 32 columns, 2 of 128.
CONTRADICTIONS = {
    "groups of 64, stored 32": (
        "pack-quantized, groups of 32",
        {"group_size": 64},
        "shape [256, 8], but config.json says a scale for groups of 64 columns, so it must be "
        "[256, 4]",
    ),
    "groups of 128, stored 32": (
        "pack-quantized, groups of 32",
        {"group_size": 128},
        "so it must be [256, 2]",
    ),
    "groups of 32, stored 128": (
        "pack-quantized, W4A16",
        {"group_size": 32},
        "so it must be [256, 8]",
    ),
    "groups that do not divide": (
        "pack-quantized, W4A16",
        {"group_size": 96},
        "a scale for groups of 96 columns, which do not divide the 256 columns",
    ),
    "rows, stored groups": (
        "pack-quantized, W4A16",
        {"strategy": "channel", "group_size": None},
        "shape [256, 2], but config.json says a scale for each row, so it must be [256, 1] or "
        "[256]",
    ),
    "rows by size, stored groups": (
        "pack-quantized, W4A16",
        {"strategy": None, "group_size": -1},
        "a scale for each row",
    ),
    "a tensor, stored rows": (
        "float-quantized, channels",
        {"strategy": "tensor"},
        "shape [256, 1], but config.json says one scale for the whole weight, so it must be [1] "
        "or []",
    ),
    "rows, stored a tensor": (
        "float-quantized, tensor",
        {"strategy": "channel"},
        "shape [1], but config.json says a scale for each row, so it must be [256, 1] or [256]",
    ),
    "blocks, stored rows": (
        "float-quantized, channels",
        {"strategy": "block", "block_structure": [128, 128]},
        "shape [256, 1], not [2, 2]",
    ),
    "rows, stored blocks": (
        "float-quantized, blocks",
        {"strategy": "channel"},
        "shape [2, 2], not [256, 1]",
    ),
}


def restate(path, change):
    """Change what config.json says of the weights."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_scales_of_another_shape_than_config_json_says_are_refused(make_form, tmp_path, case):
    name, change, said = CONTRADICTIONS[case]
    source = make_form(name, path=tmp_path / "source").path
    out = convert(source, tmp_path / "before", format="bf16").output
    restate(source, change)
    for arguments in (
        ("convert", source, tmp_path / "out", "--format", "bf16"),
        ("inspect", source),
        ("verify", out, "--against", source),
    ):
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        error = " ".join(result.output.split())
        assert result.exit_code != 0, arguments
        assert "model.layers.0.mlp.experts.0.down_proj.weight_scale: " in error
        assert said in error
        assert "fetch or convert the checkpoint again" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [None, 0, -32, 32.0, "32", True, [32]])
def test_a_group_size_that_is_no_size_is_refused(make_form, tmp_path, size):
    source = make_form("pack-quantized, groups of 32", path=tmp_path / "source").path
    restate(source, {"strategy": "group", "group_size": size})
    with pytest.raises(CheckpointError, match=r"group_0\.weights\.group_size is .*must be a pos"):
        convert(source, tmp_path / "out", format="bf16")


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        ("float-quantized, channels", "channel"),
        ("float-quantized, tensor", "tensor"),
        ("float-quantized, blocks", "block"),
    ],
)
@pytest.mark.parametrize("size", [128, 64, "128", [32]])
def test_a_group_size_without_groups_is_refused(make_form, tmp_path, form, strategy, size):
    """As compressed-tensors refuses it: either the size or the strategy is wrong."""
    source = make_form(form, path=tmp_path / "source").path
    restate(source, {"group_size": size})
    said = rf"group_0\.weights\.group_size is .*, but strategy '{strategy}' has no groups"
    with pytest.raises(CheckpointError, match=said):
        convert(source, tmp_path / "out", format="bf16")


def test_rows_by_their_group_size_are_read(make_form, read_tensors, tmp_path):
    """compressed-tensors takes a size of -1 without a strategy for one scale a row."""
    name = "pack-quantized, groups of 32"
    source = make_form(name, path=tmp_path / "source", group=256)
    restate(source.path, {"strategy": None, "group_size": -1})
    found = read_tensors(convert(source.path, tmp_path / "out", format="bf16").output)
    for weight, numbers in source.numbers.items():
        assert torch.equal(found[weight].double(), numbers.float().bfloat16().double()), weight


def test_a_converted_layer_whose_config_contradicts_its_scales_is_not_loaded(
    make_checkpoint, edit, tmp_path
):
    out = convert(make_checkpoint(layers=1), tmp_path / "out", format="fp8_channel").output
    name = f"{EXPERT}.up_proj.weight_scale"
    edit(out, {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"{name}: shape \[1\], but .* for each row"):
        load_experts(out, 0)


@every_form
def test_inspect_tells_the_parts_of_experts(make_form, forms, name):
    source, form = make_form(name), forms[name]
    result = CliRunner().invoke(cli, ["inspect", str(source.path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["formats"] == [form.format]
    (experts,) = (g for g in document["groups"] if g["role"] == "routed_experts")
    suffixes = form.encode((256, 256), torch.Generator()).tensors
    assert experts["tensors"] == len(source.numbers) * len(suffixes)


def test_kept_layers_stay_in_compressed_tensors_and_config_says_in_what(
    make_checkpoint, read_tensors, config_of, tmp_path
):
    rules = [
        {"roles": ["attention"], "format": "fp8_block"},
        {"roles": ["routed_experts"], "format": "nvfp4"},
    ]
    recipe = Recipe.model_validate({"rules": rules})
    source = convert(
        make_checkpoint(experts=2, layers=1), tmp_path / "source", recipe=recipe
    ).output
    out = convert(source, tmp_path / "out", format="mxfp4").output
    before, after = read_tensors(source), read_tensors(out)
    attention = [name for name in before if ".self_attn." in name]
    assert any(name.endswith("o_proj.weight_scale") for name in attention)
    for name in attention:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    groups = config_of(out)["quantization_config"]["config_groups"].values()
    stated = {group["format"]: group["targets"] for group in groups}
    assert stated.keys() == {"float-quantized", "mxfp4-pack-quantized"}
    assert all("self_attn" in target for target in stated["float-quantized"])
    assert verify(out, against=source).ok
    # Engines that quantize activations otherwise would be told something else by our groups.
    config = config_of(source)
    (group,) = (
        g
        for g in config["quantization_config"]["config_groups"].values()
        if g["format"] == "float-quantized"
    )
    group["input_activations"] = None
    (source / "config.json").write_text(json.dumps(config))
    result = convert(source, tmp_path / "other", format="mxfp4")
    assert any("they become BF16" in warning for warning in result.plan.warnings)
    found = read_tensors(tmp_path / "other")
    assert found["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert verify(tmp_path / "other", against=source).ok
