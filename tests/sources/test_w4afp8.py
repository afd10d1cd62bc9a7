"""DeepSeek-R1-W4AFP8 as TensorRT-LLM's script writes it, and whole models in this dialect."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli
from moequant.conversion import Recipe, convert
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.runtime import load_experts
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint
from moequant.weights.sizes import roles_in, roles_of
from moequant.weights.source_model import read_source, seen_as_source, source_config

LAYERS = {"model.layers.1.mlp.experts": {"quant_algo": "W4A8_AWQ"}}
QUANT_CFG = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
WHOLE = [
    {"roles": ["routed_experts"], "format": "w4a8"},
    {"roles": ["attention"], "format": "fp8_block"},
]


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def release(write_source, by_hand, make_checkpoint, tmp_path_factory):
    """Of a DeepSeek-V3: no quantization_config, and two files that say it together."""
    source = write_source(
        tmp_path_factory.mktemp("w4afp8") / "source",
        make_checkpoint(model_type="deepseek_v3", experts=2, intermediate=256),
        lambda module: not module.endswith(("mlp.gate", "lm_head", "embed_tokens", "eh_proj")),
        None,
        by_hand.fp8_block,
        of_experts=by_hand.int4_signed,
    )
    files = {
        "hf_quant_config.json": {"quantization": QUANT_CFG},
        "quant_cfg.json": {**QUANT_CFG, "quantized_layers": LAYERS},
    }
    for name, document in files.items():
        (source.path / name).write_text(json.dumps(document))
    return source


def test_bf16_gives_every_number_back(release, read_tensors, config_of, tmp_path):
    result = convert(release.path, tmp_path / "out", format="bf16")
    found = read_tensors(tmp_path / "out")
    for name, numbers in release.numbers.items():
        # A code times a BF16 scale has up to eleven significant bits, and is rounded to eight.
        assert torch.equal(found[name], numbers.float().bfloat16()), name
    assert not [n for n in found if n.endswith("weight_scale_inv")]
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert not (tmp_path / "out" / "quant_cfg.json").exists()
    assert {error.source for error in result.requantization_errors} == {"w4a8", "fp8_block"}
    report = verify(tmp_path / "out", against=release.path)
    assert report.ok, report.problems


@pytest.fixture
def calibrated(release, edit, tmp_path):
    """`experts.E.w1.input_scale` beside `experts.E.gate_proj.weight`, as the release has them."""
    source = tmp_path / "source"
    source.mkdir()
    for file in release.path.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    experts = {name.rpartition(".experts.")[0] for name in release.numbers if ".experts." in name}
    scales = {
        f"{block}.experts.{e}.w{i}.input_scale": torch.tensor([0.25])
        for block in experts
        for e in (0, 1)
        for i in (1, 2, 3)
    }
    edit(source, scales, new=True)
    return source


def test_scales_of_inputs_under_other_names_than_the_codes_are_left_out(
    calibrated, read_tensors, tmp_path
):
    source = calibrated
    result = convert(source, tmp_path / "out", format="w4a8")
    assert any("w1.input_scale, are not copied" in text for text in result.plan.warnings)
    assert not [name for name in read_tensors(tmp_path / "out") if name.endswith("input_scale")]
    assert verify(tmp_path / "out", against=source).ok


def test_inspect_and_the_report_count_them_among_the_experts_in_w4a8(calibrated):
    checkpoint = Checkpoint.open(calibrated)
    found = read_source(checkpoint.tensors, source_config(checkpoint))
    architecture, seen = found.model.architecture, seen_as_source(checkpoint)
    of_report = list(roles_in(checkpoint.tensors, found))
    of_inspect = list(roles_of(checkpoint.tensors.values(), architecture, seen))
    assert of_inspect == of_report
    rows = {info.name: (role, format) for info, role, format in of_report}
    scales = [name for name in rows if name.endswith(".input_scale")]
    assert scales
    for name in scales:
        role, format = rows[name]
        expert, leaf = name.removesuffix(".input_scale").rsplit(".", 1)
        codes = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[leaf]
        assert (role, format) == rows[f"{expert}.{codes}.weight"]
        assert (role.role, format) == ("routed_experts", "w4a8")


def test_the_command_inspects_it(calibrated):
    document = json.loads(CliRunner().invoke(cli, ["inspect", str(calibrated), "--json"]).stdout)
    assert document["formats"] == ["fp8_block", "w4a8"]
    (experts,) = [g for g in document["groups"] if g["role"] == "routed_experts"]
    # Codes, scales and scales of inputs, of gate, up and down of every expert.
    assert experts["tensors"] == 3 * 3 * 2 * len(document["expert_layers"])


def test_codes_stay_in_the_dialect_that_all_engines_load(release, tmp_path):
    result = convert(release.path, tmp_path / "out", format="w4a8")
    assert result.plan.dialect.name == "compressed-tensors"
    (error,) = [e for e in result.requantization_errors if e.source == "w4a8"]
    assert error.exact == error.weights
    converted = ConvertedCheckpoint.open(tmp_path / "out")
    for name, numbers in release.numbers.items():
        if ".experts." in name:
            q = converted.read(name.removesuffix(".weight"))
            assert torch.equal(dequantize(q).double(), numbers), name


def test_a_whole_model_is_written_and_read_back(make_checkpoint, read_tensors, tmp_path):
    source, out = make_checkpoint(), tmp_path / "out"
    recipe = Recipe.model_validate({"rules": WHOLE})
    convert(source, out, recipe=recipe, dialect="w4afp8")
    report = verify(out, against=source)
    assert report.ok, report.problems
    found = read_tensors(out)
    expert = "model.layers.1.mlp.experts.0.up_proj"
    assert found[f"{expert}.weight"].dtype == torch.int8
    assert found[f"{expert}.weight_scale_inv"].dtype == torch.float32
    # The same weights in compressed-tensors, and back again.
    convert(source, tmp_path / "ct", recipe=recipe, dialect="compressed-tensors")
    convert(tmp_path / "ct", tmp_path / "back", recipe=recipe, dialect="w4afp8")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == found.keys()
    assert all(torch.equal(raw(back[name]), raw(tensor)) for name, tensor in found.items())
    hidden, weights = torch.randn(3, 256).bfloat16(), torch.full((3, 2), 0.5)
    call = hidden, weights, torch.tensor([[0, 1]] * 3)
    assert torch.equal(load_experts(out, 1)(*call), load_experts(tmp_path / "ct", 1)(*call))


def test_experts_alone_are_refused_with_what_to_do(make_checkpoint, tmp_path):
    with pytest.raises(UnsupportedError, match=r"k_proj: stays unquantized.*give attention a"):
        convert(make_checkpoint(), tmp_path / "out", format="w4a8", dialect="w4afp8")
    assert not (tmp_path / "out").exists()
