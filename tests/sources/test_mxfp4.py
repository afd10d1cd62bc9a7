"""gpt-oss as it was released: experts in MXFP4, stacked and interleaved."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from moequant.conversion import Recipe, convert
from moequant.errors import CheckpointError
from moequant.formats import dequantize
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

EXPERTS, LAYERS = 2, 2


def stacks(found, layer):
    at = f"model.layers.{layer}.mlp.experts"
    return found[f"{at}.gate_up_proj"], found[f"{at}.down_proj"]


def test_bf16_gives_every_number_back_as_the_plain_release_has_it(
    make_gpt_oss, read_tensors, config_of, tmp_path
):
    source = make_gpt_oss()
    result = convert(source.path, tmp_path / "out", format="bf16", max_shard_size="500KB")
    found = read_tensors(tmp_path / "out")
    for layer in range(LAYERS):
        gate_up, down = stacks(found, layer)
        assert gate_up.dtype == down.dtype == torch.bfloat16
        for e in range(EXPERTS):
            at = f"model.layers.{layer}.mlp.experts.{e}"
            # [E, K, N], and the columns of gate and up take turns.
            for name, part in (
                ("gate_proj", gate_up[e, :, 0::2]),
                ("up_proj", gate_up[e, :, 1::2]),
                ("down_proj", down[e]),
            ):
                assert torch.equal(part.T.double(), source.numbers[f"{at}.{name}.weight"])
    assert source.plain.keys() <= found.keys()
    assert not any(name.endswith(("_blocks", "_scales")) for name in found)
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert all(error.exact == error.weights for error in result.requantization_errors)
    report = verify(tmp_path / "out", against=source.path)
    assert report.ok, report.problems


def test_what_bf16_gives_back_is_what_transformers_decodes(make_gpt_oss, tmp_path):
    source = make_gpt_oss()
    convert(source.path, tmp_path / "out", format="bf16")
    states = []
    for path, decode in (
        (source.path, {"quantization_config": Mxfp4Config(dequantize=True)}),
        (tmp_path / "out", {}),
    ):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True, **decode
        )
        # The small source has no biases of attention and no sinks.
        assert all(".self_attn." in name for name in report["missing_keys"]), report
        assert not report["unexpected_keys"]
        assert not report["mismatched_keys"]
        states.append(model.state_dict())
    experts = [name for name in states[1] if ".experts." in name]
    assert len(experts) == 4 * LAYERS
    for name in experts:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_block"])
def test_these_formats_hold_every_number(make_gpt_oss, read_tensors, tmp_path, format):
    source = make_gpt_oss()
    result = convert(source.path, tmp_path / "out", format=format)
    (error,) = result.requantization_errors
    assert (error.source, error.format, error.exact) == ("mxfp4", format, len(source.numbers))
    converted = ConvertedCheckpoint.open(tmp_path / "out")
    for name, numbers in source.numbers.items():
        q = converted.read(name.removesuffix(".weight"))
        assert q.format == format
        assert torch.equal(dequantize(q).double(), numbers), name
    if format == "mxfp4":
        before, after = read_tensors(source.path), read_tensors(tmp_path / "out")
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    report = verify(tmp_path / "out", against=source.path)
    assert report.ok, report.problems
    # Of equal weights, so what is left is what the runtime rounds.
    assert report.layers
    assert all(layer.layer_error == layer.runtime_relative_error for layer in report.layers)


@pytest.mark.parametrize(("format", "widest"), [("fp8_block", 14), ("nvfp4", 17)])
def test_exponents_further_apart_than_a_format_holds_are_said(
    make_gpt_oss, tmp_path, format, widest
):
    for spread, exact in ((widest, True), (widest + 1, False)):
        source = make_gpt_oss(exponents=(-20, -20 + spread))
        result = convert(source.path, tmp_path / f"{spread}", format=format)
        (error,) = result.requantization_errors
        assert (error.exact == error.weights) is exact
        assert (error.relative_error == 0) is exact
        report = verify(tmp_path / f"{spread}", against=source.path)
        assert report.ok, report.problems
        assert report.requantization_errors == result.requantization_errors


def test_layers_that_no_rule_speaks_of_stay_or_become_bf16(make_gpt_oss, read_tensors, tmp_path):
    source = make_gpt_oss()
    rule = {"roles": ["routed_experts"], "layers": "0", "format": "fp8_block"}
    recipe = Recipe.model_validate({"rules": [rule]})
    result = convert(source.path, tmp_path / "out", recipe=recipe)
    assert result.plan.dialect.name == "moequant"
    found = read_tensors(tmp_path / "out")
    assert stacks(found, 1)[0].dtype == torch.bfloat16
    assert verify(tmp_path / "out", against=source.path).ok
    rule = {"roles": ["routed_experts"], "layers": "0", "format": "mxfp4"}
    recipe = Recipe.model_validate({"rules": [rule], "output": {"dialect": "gpt-oss"}})
    convert(source.path, tmp_path / "same", recipe=recipe)
    before, after = read_tensors(source.path), read_tensors(tmp_path / "same")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert verify(tmp_path / "same", against=source.path).ok


def test_a_stack_of_another_shape_is_refused(make_gpt_oss, config_of, tmp_path):
    source = make_gpt_oss()
    shutil.copytree(source.path, tmp_path / "source")
    config = config_of(source.path) | {"num_local_experts": 3}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks: U8 \[2, 512, 8, 16\], but"):
        convert(tmp_path / "source", tmp_path / "out", format="bf16")
