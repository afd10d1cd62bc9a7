"""Static scales of activations: where they come from, what dialects write, and what reads them."""

from __future__ import annotations

import json
import math
import tomllib

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moequant.cli import cli
from moequant.conversion import Recipe, convert, plan_checkpoint
from moequant.errors import CheckpointError, RecipeError, StatisticsError, UnsupportedError
from moequant.runtime import load_experts
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

DIALECTS = ("compressed-tensors", "modelopt", "moequant")
STORED = {
    ("nvfp4", "compressed-tensors"): ("input_global_scale", (1,)),
    ("nvfp4", "modelopt"): ("input_scale", ()),
    ("nvfp4", "moequant"): ("input_scale", ()),
    ("fp8_tensor", "compressed-tensors"): ("input_scale", (1,)),
    ("fp8_tensor", "modelopt"): ("input_scale", ()),
    ("fp8_tensor", "moequant"): ("input_scale", ()),
}
"""Name and shape of the tensor by format and dialect."""
LARGEST = {"nvfp4": 448 * 6, "fp8_tensor": 448}
"""What a scale of 1 holds."""
EXPERTS, LAYERS, PRIOR = 4, 2, 8
F32 = np.float32


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


def magnitudes(layer, name):
    """What calibration measured: four experts, the first without tokens."""
    start = 3.0 if name == "hidden" else 700.0
    return torch.tensor([0.0, *(start * (layer + 1) * 1.1**e for e in range(1, EXPERTS))])


@pytest.fixture(scope="module")
def stats(source, measure, tmp_path_factory):
    return measure(source, tmp_path_factory.mktemp("s") / "stats", amax=magnitudes)


def wanted_scale(layer, expert, projection, format="nvfp4"):
    """The multiplier, by the definitions: amax drawn toward the layer's largest, over LARGEST."""
    name = "intermediate" if projection == "down" else "hidden"
    tokens, own = 30 * expert, magnitudes(layer, name).double()
    amax = F32((tokens * own[expert] + PRIOR * own.max()) / (tokens + PRIOR))
    return F32(amax / F32(LARGEST[format]))


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def same(one, other):
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def module(layer, expert, projection):
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"


def every_projection():
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                yield layer, expert, projection


@pytest.mark.parametrize(("format", "dialect"), STORED)
def test_each_expert_gets_the_scale_of_its_statistics_and_down_its_own(
    source, stats, tmp_path, format, dialect
):
    out, (name, shape) = tmp_path / "out", STORED[format, dialect]
    settings = {"format": format, "dialect": dialect}
    convert(source, out, activation_scales="statistics", statistics=stats, **settings)
    found = tensors(out)
    for place in every_projection():
        stored = found.pop(f"{module(*place)}.{name}")
        wanted = wanted_scale(*place, format)
        wanted = F32(1) / wanted if name == "input_global_scale" else wanted
        assert (stored.dtype, tuple(stored.shape)) == (torch.float32, shape)
        assert stored.item() == wanted, place
    # All else is as without.
    if format == "nvfp4":
        settings["statistics"] = stats
    convert(source, tmp_path / "weight-only", **settings)
    plain = tensors(tmp_path / "weight-only")
    assert found.keys() == plain.keys()
    assert all(same(tensor, plain[name]) for name, tensor in found.items())
    report = verify(out, against=source, statistics=stats)
    assert report.ok, report.problems
    assert report.method == "bytes"


@pytest.mark.parametrize(("format", "dialect"), STORED)
def test_our_runtime_reads_them_back_as_multipliers_and_runs_with_them(
    source, stats, tmp_path, format, dialect
):
    out = tmp_path / "out"
    convert(
        source,
        out,
        format=format,
        dialect=dialect,
        statistics=stats,
        activation_scales="statistics",
    )
    experts = load_experts(out, 1)
    scheme = {"nvfp4": "nvfp4_static", "fp8_tensor": "fp8_static"}[format]
    assert experts.packed().workload.activations == scheme
    of = {"w13_input_scale": "gate", "w2_input_scale": "down"}
    for name, projection in of.items():
        wanted = torch.tensor([wanted_scale(1, e, projection, format) for e in range(EXPERTS)])
        # Of nvfp4, compressed-tensors stores a divisor: two roundings to float32.
        divides = STORED[format, dialect][0] == "input_global_scale"
        tolerance = 2.0**-23 if divides else 0
        assert torch.allclose(getattr(experts, name), wanted, rtol=tolerance, atol=0)
    call = torch.randn(3, 256), torch.full((3, 2), 0.5), torch.tensor([[0, 1]] * 3)
    assert not torch.equal(experts(*call), load_experts(out, 1, activations="none")(*call))
    shown = CliRunner().invoke(cli, ["inspect", str(out), "--json"])
    document = json.loads(shown.stdout)
    assert (document["formats"], document["dialect"]) == ([format], dialect)
    groups = {g["role"]: g for g in document["groups"] if g["format"]}
    assert groups.keys() == {"routed_experts"}
    # Codes, scales, of nvfp4 the global scale, and the scale of the input.
    parts = 4 if format == "nvfp4" else 3
    assert groups["routed_experts"]["tensors"] == parts * EXPERTS * LAYERS * 3


def test_fp8_experts_multiply_activations_that_the_largest_scale_of_the_layer_quantized(
    source, stats, tmp_path
):
    out = tmp_path / "out"
    settings = {"statistics": stats, "activation_scales": "statistics"}
    convert(source, out, format="fp8_tensor", **settings)
    experts, plain = load_experts(out, 1), load_experts(out, 1, activations="none")
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    largest = max(wanted_scale(1, e, "gate", "fp8_tensor") for e in range(EXPERTS))
    rounded = (hidden / float(largest)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    weights, ids = torch.full((3, 2), 0.5), torch.tensor([[0, 1]] * 3)
    got = experts(hidden, weights, ids).double()
    # Only the input is rounded in what it is compared with; the intermediate is far from its
    # scale's ends, and loses at most a sixteenth of each number.
    near = plain(rounded * float(largest), weights, ids).double()
    assert (got - near).norm() < 2.0**-4 * near.norm()
    assert not torch.equal(got, plain(hidden, weights, ids).double())


def test_engines_that_need_scales_of_fp8_activations_are_warned_of_without(source):
    checkpoint = Checkpoint.open(source)
    for scale in (None, 0.5):
        warnings = plan_checkpoint(
            checkpoint, Recipe.for_format("fp8_tensor", activation_scales=scale)
        ).warnings
        found = [w for w in warnings if "only if activations have one, too" in w]
        assert len(found) == (0 if scale else 2), warnings  # vLLM's and SGLang's


@pytest.mark.parametrize("statistics", [True, False])
def test_verify_finds_a_changed_scale_of_fp8_activations(source, stats, tmp_path, statistics):
    out, name = tmp_path / "out", f"{module(1, 3, 'down')}.input_scale"
    given = {"statistics": stats} if statistics else {}
    scale = "statistics" if statistics else 0.5
    convert(source, out, format="fp8_tensor", activation_scales=scale, **given)
    assert verify(out, against=source, **given).ok
    change(out, name, 3.0)
    problems = verify(out, against=source, **given).problems
    assert name in {problem.name for problem in problems if problem.check == "weights"}


def test_fp8_without_a_record_is_checked_by_its_range(source, tmp_path):
    out, name = tmp_path / "out", f"{module(0, 1, 'gate')}.input_scale"
    convert(source, out, format="fp8_tensor", activation_scales=0.5)
    (out / "moequant.json").unlink()
    report = verify(out, against=source)
    assert (report.ok, report.method) == (True, "bounds"), report.problems
    change(out, name, -1.0)
    (problem,) = verify(out, against=source).problems
    assert problem.name == name
    assert "the static scale of its input is -1, but" in problem.message


def test_an_fp8_output_is_a_source_again(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, format="fp8_tensor", activation_scales=0.5)
    again = convert(out, tmp_path / "again", format="fp8_tensor", activation_scales=2.0)
    (error,) = again.requantization_errors
    assert error.exact == error.weights
    one, other = tensors(out), tensors(tmp_path / "again")
    for name, tensor in one.items():
        if name.endswith("input_scale"):
            assert (tensor.item(), other[name].item()) == (0.5, 2.0)
        else:
            assert same(tensor, other[name]), name


def test_sglang_is_warned_of_only_without_scales(source):
    checkpoint = Checkpoint.open(source)
    for scale in (None, 1.0):
        recipe = Recipe.for_format("nvfp4", activation_scales=scale).with_output(
            dialect="modelopt", max_shard_size=None
        )
        warnings = plan_checkpoint(checkpoint, recipe).warnings
        assert any("with a constant scale of 1" in w for w in warnings) == (scale is None)


def test_a_constant_is_the_multiplier_itself(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, format="nvfp4", activation_scales=0.25)
    scales = {n: t for n, t in tensors(out).items() if n.endswith("input_global_scale")}
    assert len(scales) == EXPERTS * LAYERS * 3
    assert {t.item() for t in scales.values()} == {4.0}
    assert verify(out, against=source).ok
    rule = json.loads((out / "moequant.json").read_text())["recipe"]["rules"][0]
    assert rule["activation_scales"] == 0.25


def scale_file(path, **changed):
    scales = {
        f"{module(*place)}.input_scale": torch.tensor(2.0 ** -(i % 7))
        for i, place in enumerate(every_projection())
    }
    save_file({**scales, **changed}, path)
    return path


def test_scales_of_a_file_are_taken_by_module_and_gate_and_up_share_the_larger(source, tmp_path):
    file, out = scale_file(tmp_path / "scales"), tmp_path / "out"
    convert(source, out, format="nvfp4", dialect="modelopt", activation_scales=file)
    given, found = load_file(file), tensors(out)
    for layer, expert, projection in every_projection():
        together = ("down",) if projection == "down" else ("gate", "up")
        wanted = max(given[f"{module(layer, expert, p)}.input_scale"] for p in together)
        assert found[f"{module(layer, expert, projection)}.input_scale"] == wanted
    assert verify(out, against=source, activation_scales=file).ok
    with pytest.raises(StatisticsError, match=r"converted with activation scales, SHA-256 .*--act"):
        verify(out, against=source)
    other = scale_file(tmp_path / "other", more=torch.ones(()))
    with pytest.raises(StatisticsError, match=r"tensor 'more', F32; a file of activation scales"):
        verify(out, against=source, activation_scales=other)
    changed = {f"{module(0, 0, 'down')}.input_scale": torch.tensor(3.0)}
    other = scale_file(tmp_path / "other", **changed)
    with pytest.raises(StatisticsError, match=r"its SHA-256 is .* with activation scales of SHA"):
        verify(out, against=source, activation_scales=other)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 2.0**-118])
def test_a_scale_of_a_file_that_engines_cannot_use_is_refused_by_name(source, tmp_path, value):
    name = f"{module(1, 2, 'up')}.input_scale"
    file = scale_file(tmp_path / "scales", **{name: torch.tensor(value)})
    with pytest.raises(StatisticsError, match=rf"scales: {name}: the static scale .* is {value:g}"):
        convert(source, tmp_path / "out", format="nvfp4", activation_scales=file)


def test_a_file_without_a_module_s_scale_is_refused_by_name(source, tmp_path):
    file = tmp_path / "scales"
    save_file({"a.input_scale": torch.ones(())}, file)
    with pytest.raises(StatisticsError, match=rf"no {module(0, 0, 'down')}.input_scale, but"):
        convert(source, tmp_path / "out", format="nvfp4", activation_scales=file)


def test_a_layer_that_saw_only_zeros_is_refused_by_name(source, measure, tmp_path):
    def amax(layer, name):
        return torch.full((EXPERTS,), float((layer, name) != (1, "intermediate")))

    stats = measure(source, tmp_path / "stats", amax=amax)
    said = rf"{module(1, 0, 'down')}.weight: the largest magnitude of its inputs is 0, but"
    with pytest.raises(StatisticsError, match=said):
        convert(
            source,
            tmp_path / "out",
            format="nvfp4",
            statistics=stats,
            workers=1,
            activation_scales="statistics",
        )


RULE = '[[rules]]\nroles = ["routed_experts"]\nformat = "nvfp4"\n'


def recipe(folder, *lines):
    path = folder / "recipe.toml"
    path.write_text(RULE + "\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("line", "given", "message"),
    [
        ('activation_scales = "statistics"', None, "needs statistics: measure them"),
        ('activation_scales = "file"', None, "give the file with --activation-scales"),
        ('activation_scales = "some"', None, "'some' is neither a number nor \"stat"),
        (
            "activation_scales = 0",
            None,
            "activation_scales: the scale is 0, but must be from .*; give another",
        ),
        ("activation_scales = true", None, "True is neither a number nor"),
        ("activation_scales = 1.0", 1.0, "1.0 beside a recipe, whose rules say"),
    ],
)
def test_rules_that_make_no_sense_are_refused(source, tmp_path, line, given, message):
    path = recipe(tmp_path, line)
    with pytest.raises(RecipeError, match=message):
        convert(source, tmp_path / "out", recipe=path, activation_scales=given)


def test_a_format_whose_activations_have_no_static_scale_is_refused(source, tmp_path):
    for format in ("mxfp4", "bf16"):
        with pytest.raises(RecipeError, match=f"beside nvfp4, fp8_tensor, not {format}; remove"):
            convert(source, tmp_path / "out", format=format, activation_scales=1.0)


def test_a_file_that_no_rule_names_is_refused(source, tmp_path):
    file = scale_file(tmp_path / "scales")
    rule = recipe(tmp_path, "activation_scales = 1.0")
    with pytest.raises(StatisticsError, match="scales: nothing uses these scales of activations"):
        convert(source, tmp_path / "out", recipe=rule, activation_scales=file)


def test_experts_of_a_layer_that_differ_are_refused(source, tmp_path):
    first = RULE + 'match = ".*experts.0.*"\nactivation_scales = 1.0\n'
    (tmp_path / "r.toml").write_text(first + RULE)
    with pytest.raises(RecipeError, match=r"and .* nvfp4 with activation_scales, but the experts"):
        convert(source, tmp_path / "out", recipe=tmp_path / "r.toml")


def test_statistics_that_only_scales_of_activations_use_are_used(source, stats, tmp_path):
    path = recipe(tmp_path, 'options = {search = "none"}', 'activation_scales = "statistics"')
    result = convert(source, tmp_path / "out", recipe=path, statistics=stats)
    assert not any("do not use the statistics" in warning for warning in result.plan.warnings)
    assert verify(tmp_path / "out", against=source, statistics=stats).ok


@pytest.mark.parametrize("dialect", DIALECTS)
def test_layers_without_a_scale_stay_weight_only(source, tmp_path, dialect):
    text = RULE + 'layers = "0"\nactivation_scales = 1.0\n' + RULE
    rules = Recipe.model_validate(tomllib.loads(text))
    if dialect == "modelopt":
        said = "layers.0.* has a static scale of activations and .*layers.1.* has none, but in the"
        with pytest.raises(UnsupportedError, match=said):
            convert(source, tmp_path / "out", recipe=rules, dialect=dialect)
        return
    convert(source, tmp_path / "out", recipe=rules, dialect=dialect)
    schemes = [load_experts(tmp_path / "out", i).packed().workload.activations for i in range(2)]
    assert schemes == ["nvfp4_static", "none"]
    assert verify(tmp_path / "out", against=source).ok


def test_multi_token_prediction_without_statistics_stays_weight_only_with_a_warning(
    make_checkpoint, measure, tmp_path
):
    source = make_checkpoint(model_type="deepseek_v3")
    stats = measure(source, tmp_path / "stats")
    result = convert(
        source, tmp_path / "out", format="nvfp4", statistics=stats, activation_scales="statistics"
    )
    (warning,) = [w for w in result.plan.warnings if "get no static scale of activations" in w]
    apart = {u.name for u in result.plan.units if u.activation_scales is None}
    roles = result.plan.model.roles
    assert {roles[name].layer for name in apart} == {*result.plan.model.moe.optional_layers}
    assert apart
    assert min(apart) in warning
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert report.ok, report.problems


def test_bytes_do_not_depend_on_workers_or_interruptions(source, stats, tmp_path, monkeypatch):
    settings = {
        "format": "nvfp4",
        "statistics": stats,
        "activation_scales": "statistics",
        "max_shard_size": "300KB",
    }
    for workers in (1, 5):
        convert(source, tmp_path / str(workers), workers=workers, **settings)

    class StopError(Exception):
        pass

    def stop(*arguments):
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr("moequant.conversion.planned_conversion.commit", stop)
        with pytest.raises(StopError):
            convert(source, tmp_path / "out", **settings)
    resumed = convert(source, tmp_path / "out", **settings)
    assert resumed.resumed_shards == len(resumed.plan.shards) > 1
    one, other, third = (
        {f.name: f.read_bytes() for f in (tmp_path / name).glob("*.safetensors")}
        for name in ("1", "5", "out")
    )
    assert one == other == third


def test_another_scale_is_another_plan(source):
    checkpoint = Checkpoint.open(source)
    digests = {
        plan_checkpoint(checkpoint, Recipe.for_format("nvfp4", activation_scales=scale)).digest
        for scale in (None, 1.0, 2.0)
    }
    assert len(digests) == 3


@pytest.fixture
def written(source, tmp_path):
    convert(source, tmp_path / "out", format="nvfp4", activation_scales=0.5)
    return tmp_path / "out"


def change(folder, name, value):
    """Change a scale where it lies."""
    info = Checkpoint.open(folder).info(name)
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start)
        file.write(torch.tensor([value]).numpy().tobytes())


def test_verify_finds_another_scale(source, written):
    name = f"{module(1, 3, 'down')}.input_global_scale"
    change(written, name, 3.0)
    problems = verify(written, against=source).problems
    assert name in {problem.name for problem in problems if problem.check == "weights"}


def test_verify_finds_a_config_that_says_weight_only(source, written):
    config = json.loads((written / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (written / "config.json").write_text(json.dumps(config))
    problems = verify(written, against=source).problems
    assert any("says no static scale, but it has one" in p.message for p in problems)


def test_without_a_record_scales_are_checked_by_their_range(source, written):
    (written / "moequant.json").unlink()
    report = verify(written, against=source)
    assert report.ok, report.problems
    assert report.method == "bounds"
    name = f"{module(0, 1, 'gate')}.input_global_scale"
    change(written, name, 0.0)
    (problem,) = verify(written, against=source).problems
    assert problem.name == name
    assert "the static scale of its input is inf" in problem.message


def test_a_w4a4_output_is_a_source_again(source, written, tmp_path):
    result = convert(written, tmp_path / "again", format="nvfp4", activation_scales=2.0)
    one, other = tensors(written), tensors(tmp_path / "again")
    for name, tensor in one.items():
        if name.endswith("input_global_scale"):
            assert (tensor.item(), other[name].item()) == (2.0, 0.5)
        else:
            assert same(tensor, other[name]), name
    assert any("calibrated scales of activations" in w for w in result.plan.warnings)


def test_the_command_plans_converts_and_verifies(source, stats, tmp_path):
    out, run = str(tmp_path / "out"), CliRunner().invoke
    args = [str(source), out, "--format", "nvfp4", "--statistics", str(stats)]
    planned = run(cli, ["convert", *args, "--activation-scales", "statistics", "--dry-run"])
    row = f"{EXPERTS * LAYERS * 3} weights, {EXPERTS * LAYERS * 3} of them from the statistics"
    assert planned.exit_code == 0, planned.output
    assert row in planned.stdout
    file = scale_file(tmp_path / "scales")
    done = run(cli, ["convert", *args, "--activation-scales", str(file)])
    assert done.exit_code == 0, done.output
    command = done.stdout.splitlines()[-1].partition("moequant ")[2].split()
    checked = run(cli, command)
    assert checked.exit_code == 0, checked.output
    wrong = run(cli, ["convert", *args, "--activation-scales", "0"])
    assert wrong.exit_code == 6
    assert "activation scales: the scale" in wrong.output


def test_no_such_file_is_refused(source, tmp_path):
    with pytest.raises(StatisticsError, match=r"nothing: cannot be read: No such .*a file of act"):
        convert(source, tmp_path / "out", format="nvfp4", activation_scales=tmp_path / "nothing")


def test_a_scale_that_is_missing_is_found_when_the_layer_is_loaded(written):
    config = json.loads((written / "model.safetensors.index.json").read_text())
    for file in written.glob("*.safetensors"):
        kept = {n: t for n, t in load_file(file).items() if "experts.2.up_proj.input" not in n}
        save_file(kept, file)
    config["weight_map"] = {
        n: f for n, f in config["weight_map"].items() if "2.up_proj.inp" not in n
    }
    (written / "model.safetensors.index.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts.2.up_proj.input_global_scale: not there"):
        load_experts(written, 0)
