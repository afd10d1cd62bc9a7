"""The error of a layer with its activations is what runs it with the checkpoint's static scales."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moequant.cli import cli
from moequant.conversion import convert
from moequant.runtime import load_experts
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify
from moequant.verification.layer_activations import LayerActivations, fit
from moequant.verification.layer_batch import make_batch
from moequant.verification.layers import _relative
from moequant.verification.reference import evaluate_layer
from moequant.weights.converted import ConvertedCheckpoint

EXPERTS = 12
LAYER = 1
AT = f"model.layers.{LAYER}.mlp.experts"
SCHEMES = {"fp8_tensor": "fp8_static", "nvfp4": "nvfp4_static"}


@pytest.fixture(scope="module")
def source(make_checkpoint):
    """More experts than are run of a layer."""
    return make_checkpoint(experts=EXPERTS, hidden=128, intermediate=128)


def measured(out, source):
    """What was found of the last layer."""
    return verify(out, against=source).layers[-1]


def change(out, values):
    """Replace tensors by a number, or take them away for None."""
    for path in out.glob("*.safetensors"):
        held = load_file(path)
        for name in [name for name in values if name in held]:
            was = held.pop(name)
            if values[name] is not None:
                held[name] = torch.full_like(was, values[name])
        save_file(held, path, metadata={"format": "pt"})


@pytest.mark.parametrize("format", SCHEMES)
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_the_error_is_that_of_what_load_experts_computes(source, tmp_path, format, scale):
    out = convert(source, tmp_path / "out", format=format, activation_scales=scale).output
    found = measured(out, source)
    assert (found.activations, found.input_std) == (SCHEMES[format], 1.0)
    batch = make_batch(ConvertedCheckpoint.open(out, quantized_activations=True).moe)
    plain = Checkpoint.open(source)
    wanted, bound = evaluate_layer(
        batch.hidden,
        batch.topk_ids,
        batch.topk_weights,
        lambda p, e: plain.read(f"{AT}.{e}.{p}_proj.weight").double(),
    )
    output = load_experts(out, LAYER)(batch.hidden, batch.topk_weights, batch.topk_ids)
    assert found.quantized_activations_error == _relative(output.double(), wanted, bound)
    assert found.quantized_activations_error > found.layer_error


def test_the_largest_scale_of_a_layer_counts_though_its_expert_does_not_run(source, tmp_path):
    out = convert(source, tmp_path / "out", format="fp8_tensor", activation_scales=0.01).output
    before = measured(out, source)
    ran = make_batch(ConvertedCheckpoint.open(out, quantized_activations=True).moe).experts
    other = next(e for e in range(EXPERTS) if e not in ran)
    change(out, {f"{AT}.{other}.down_proj.input_scale": 1e4})
    after = measured(out, source)
    assert after.layer_error == before.layer_error
    # Inputs of down, below 1, are less than half of the smallest E4M3 number, 2**-9, times 1e4.
    assert after.quantized_activations_error == 1.0


def test_inputs_stay_within_narrow_scales(source, tmp_path):
    """With 448e-3 for hidden states; N(0, 1) would lose more than half of its magnitude."""
    out = convert(source, tmp_path / "out", format="fp8_tensor", activation_scales=1e-3).output
    found = measured(out, source)
    assert found.input_std == 2.0**-3, "the largest of 16 x 128 is from 1.8 to 3.58"
    assert found.activations_not_measured is None
    # Weights and both activations in E4M3, 2.7 % each, of which errors add up as squares.
    assert found.layer_error < found.quantized_activations_error < 2 * found.layer_error


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "down_proj.input_scale: not there"), (math.inf, "down_input_scale[0] is inf")],
)
def test_what_cannot_be_run_with_its_scales_is_not_measured(source, tmp_path, value, reason):
    out = convert(source, tmp_path / "out", format="fp8_tensor", activation_scales=0.01).output
    change(out, {f"{AT}.3.down_proj.input_scale": value})
    report = verify(out, against=source)
    first, last = report.layers
    assert first.quantized_activations_error is not None
    assert last.quantized_activations_error is None
    assert last.activations == "fp8_static"
    assert reason in last.activations_not_measured
    assert last.layer_error < 0.1, "that needs no scales"
    assert not report.ok


def test_activations_in_mxfp4_are_run_as_another_tool_s_config_says(source, tmp_path):
    out = convert(source, tmp_path / "out", format="mxfp4").output
    weight_only = measured(out, source)
    config = json.loads((out / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = {**group["weights"], "dynamic": True}
    (out / "config.json").write_text(json.dumps(config))
    (out / "moequant.json").unlink()
    report = verify(out, against=source)
    assert report.ok, report.problems
    found = report.layers[-1]
    assert (weight_only.activations, found.activations) == ("none", "mxfp4")
    assert found.layer_error == weight_only.layer_error == weight_only.quantized_activations_error
    assert found.quantized_activations_error > 1.2 * found.layer_error


@pytest.mark.parametrize("format", SCHEMES)
@pytest.mark.parametrize(("scale", "warned"), [(0.001, False), (1.0, False), (1000.0, True)])
def test_scales_that_do_not_fit_are_a_warning(source, tmp_path, format, scale, warned):
    out = convert(source, tmp_path / "out", format=format, activation_scales=scale).output
    report = verify(out, against=source)
    assert report.ok, report.problems
    assert [layer.warning is not None for layer in report.layers] == [warned, warned]
    written = [layer["warning"] for layer in report.to_json()["layers"]]
    assert written == [layer.warning for layer in report.layers]


def test_other_errors_are_no_fault_of_scales(source, tmp_path):
    out = convert(source, tmp_path / "out", format="nvfp4", activation_scales=1000.0).output
    found = measured(out, source)
    for other in (
        {"activations": "nvfp4"},
        {"layer_error": 0.4},  # which makes it less than three times as large
        {"layer_error": math.nan},
        {"quantized_activations_error": 0.5},
        {"quantized_activations_error": None},
    ):
        assert replace(found, **other).warning is None


def test_the_command_warns_of_scales_once(source, tmp_path):
    out = convert(source, tmp_path / "out", format="nvfp4", activation_scales=1000.0).output
    done = CliRunner().invoke(cli, ["verify", str(out), "--against", str(source)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert said.count("with its activation scales and by") == 1
    assert "with --statistics FILE --activation-scales statistics, or run the experts" in said
    assert "1 other layer has the same warning; --json shows each" in said


def test_the_command_says_why(source, tmp_path):
    out = convert(source, tmp_path / "out", format="fp8_tensor", activation_scales=1e-20).output
    done = CliRunner().invoke(cli, ["verify", str(out), "--against", str(source)])
    assert done.exit_code == 0, done.output
    assert f"Layer {LAYER} with its activations (fp8_static): not measured" in done.output
    assert "hold hidden states up to 4.48e-18" in done.output


def test_hidden_states_are_halved_until_the_inputs_of_down_fit_too():
    hidden = torch.full((2, 4), 8.0)
    activations = LayerActivations(
        choice="format", scheme="fp8_static", experts=None, hidden_range=4.0, down_range=1.0
    )

    def evaluate(scaled):
        # As gate times up: the square.
        return scaled.double(), scaled.double(), float(scaled.max()) ** 2

    fitted = fit(hidden, activations, evaluate)
    assert fitted.factor == 2.0**-5, "16 is more than 1 by four halvings, of which two suffice"
    assert fitted.hidden.max() == 0.25
    assert fitted.not_measured is None
