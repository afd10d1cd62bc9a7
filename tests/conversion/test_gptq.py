"""Conversions that round by GPTQ: which weights, by which statistics, verified and repeatable."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from moequant.conversion import Recipe, convert
from moequant.conversion.rounding import options_of_format
from moequant.errors import ArgumentError, RecipeError, StatisticsError, UnsupportedError
from moequant.formats import CONVERTIBLE, get_format
from moequant.quantizers.column_rounding import round_columns_in_torch
from moequant.quantizers.gptq import Gptq, unpacked_codes
from moequant.quantizers.gpu_columns import ColumnRounder
from moequant.statistics import Statistics
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

GPTQ = {"rounding": "gptq"}
FORMATS = [name for name in CONVERTIBLE if "rounding" in options_of_format(name)]


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint(layers=1, experts=3)


@pytest.fixture(scope="module")
def stats(source, measure, tmp_path_factory):
    return measure(source, tmp_path_factory.mktemp("statistics") / "stats", hessian=True)


def files(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def expected(unit, source, statistics, *, activation_order):
    """The weights of a unit, rounded one by one."""
    checkpoint = Checkpoint.open(source)
    weights = [checkpoint.read(weight.info.name) for weight in unit.weights]
    places = [weight.expert for weight in unit.weights]
    squares = [statistics.input_mean_square(*place) for place in places]
    nearest = get_format(unit.format).quantize_fused(
        weights,
        unit.options,
        names=[weight.info.name for weight in unit.weights],
        mean_squares=squares if unit.options["search"] == "weighted" else None,
    )
    for place, w, q in zip(places, weights, nearest, strict=True):
        gptq = Gptq(statistics.hessian(*place), activation_order=activation_order)
        yield q, gptq.round(w, q)


@pytest.mark.parametrize(
    ("format", "order"), [*((name, "stored") for name in FORMATS), ("w4a8", "activation")]
)
def test_each_weight_is_rounded_by_the_second_moments_of_its_expert(
    source, stats, tmp_path, format, order
):
    out, statistics = tmp_path / "out", Statistics.load(stats)
    options = {**GPTQ, "column_order": order}
    result = convert(source, out, format=format, options=options, statistics=stats)
    found = Checkpoint.open(out)
    errors, changed = {}, 0
    for unit in result.plan.units:
        assert unit.options["search"] == "weighted"
        rounded = expected(unit, source, statistics, activation_order=order == "activation")
        for weight, (nearest, wanted) in zip(unit.weights, rounded, strict=True):
            for name, tensor in result.plan.dialect.to_disk(weight.module, wanted.weight).items():
                one, other = (t.reshape(-1).view(torch.uint8) for t in (found.read(name), tensor))
                assert torch.equal(one, other), name
            changed += not torch.equal(unpacked_codes(nearest), unpacked_codes(wanted.weight))
            one = errors.setdefault(weight.expert[2], [0, 0, 0.0, 0.0])
            values = (1, wanted.damping is None, wanted.error_before, wanted.error)
            errors[weight.expert[2]] = [a + b for a, b in zip(one, values, strict=True)]
    # Expert 0 saw no token: its down projection has a diagonal Hessian, and stays as it is.
    assert changed == 3 * 3 - 1
    assert {e.projection for e in result.gptq_errors} == {"gate", "up", "down"}
    for error in result.gptq_errors:
        assert (error.format, error.device) == (format, "cpu")
        assert [error.weights, error.unchanged] == errors[error.projection][:2]
        assert [error.nearest, error.error] == pytest.approx(errors[error.projection][2:])
        assert error.ratio < 0.9
    record = json.loads((out / "moequant.json").read_text())
    assert record["gptq_errors"] == [error.to_json() for error in result.gptq_errors]
    report = verify(out, against=source, statistics=stats)
    assert report.ok, report.problems
    assert report.method == "bytes"


def test_a_named_search_stays(source, stats, tmp_path):
    for search in ("none", "weighted"):
        options = {**GPTQ, "search": search}
        plan = convert(
            source, tmp_path, format="nvfp4", options=options, statistics=stats, dry_run=True
        ).plan
        assert {unit.options["search"] for unit in plan.units} == {search}
        assert all(unit.rounding is not None for unit in plan.units)


def test_bytes_and_record_depend_neither_on_workers_nor_on_the_quantizer(
    source, stats, tmp_path, monkeypatch
):
    given = {"format": "mxfp4", "options": GPTQ, "statistics": stats}
    for workers in (1, 5):
        convert(source, tmp_path / str(workers), workers=workers, **given)
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    convert(source, tmp_path / "torch", **given)
    assert files(tmp_path / "1") == files(tmp_path / "5") == files(tmp_path / "torch")
    records = [json.loads((tmp_path / n / "moequant.json").read_text()) for n in ("1", "5")]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("named", "search_range"), [({}, "narrow"), ({"search_range": "wide"}, "wide")]
)
def test_w4a8_searches_a_narrow_range_unless_the_rule_names_one(
    source, stats, tmp_path, named, search_range
):
    given = {"format": "w4a8", "statistics": stats, "dry_run": True}
    plan = convert(source, tmp_path, options=GPTQ | named, **given).plan
    assert {unit.options["search_range"] for unit in plan.units} == {search_range}
    plan = convert(source, tmp_path, options=named, **given).plan
    assert {unit.options["search_range"] for unit in plan.units} == {"wide"}


class _StopError(Exception):
    pass


def test_an_interrupted_conversion_continues_with_the_same_options_only(
    source, stats, tmp_path, monkeypatch
):
    given = {"format": "mxfp4", "statistics": stats, "max_shard_size": "300KB"}
    convert(source, tmp_path / "whole", options=GPTQ, **given)

    def stop(*arguments):
        raise _StopError

    with monkeypatch.context() as patch:
        patch.setattr("moequant.conversion.planned_conversion.commit", stop)
        with pytest.raises(_StopError):
            convert(source, tmp_path / "out", options=GPTQ, **given)
    with pytest.raises(Exception, match="unfinished conversion into mxfp4"):
        convert(source, tmp_path / "out", **given)
    result = convert(source, tmp_path / "out", options=GPTQ, **given)
    assert result.resumed_shards == len(result.plan.shards)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    records = [json.loads((tmp_path / n / "moequant.json").read_text()) for n in ("out", "whole")]
    assert records[0]["gptq_errors"] == records[1]["gptq_errors"]


def flip(folder, name, position):
    """Change the lowest bit of one byte of a tensor, and the shard's digest in the record."""
    info = Checkpoint.open(folder).tensors[name]
    path = folder / info.file
    data = bytearray(path.read_bytes())
    data[info.start + position] ^= 1
    path.write_bytes(data)
    record = json.loads((folder / "moequant.json").read_text())
    record["shards"][info.file]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "moequant.json").write_text(json.dumps(record))


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_verify_finds_one_wrong_code(source, stats, tmp_path, position):
    out = tmp_path / "out"
    convert(source, out, format="mxfp4", options=GPTQ, statistics=stats)
    name = "model.layers.0.mlp.experts.2.up_proj.weight_packed"
    info = Checkpoint.open(out).tensors[name]
    flip(out, name, position % (info.stop - info.start))
    report = verify(out, against=source, statistics=stats)
    assert [(p.check, p.name) for p in report.problems] == [("weights", name)]


def test_verify_finds_the_nearest_codes_where_gptq_was_asked_for(source, stats, tmp_path):
    for name, options in (("out", GPTQ), ("nearest", None)):
        convert(source, tmp_path / name, format="mxfp4", options=options, statistics=stats)
    records = {
        name: json.loads((tmp_path / name / "moequant.json").read_text())
        for name in ("out", "nearest")
    }
    for file, data in files(tmp_path / "nearest").items():
        (tmp_path / "out" / file).write_bytes(data)
    changed = records["out"] | {"shards": records["nearest"]["shards"]}
    (tmp_path / "out" / "moequant.json").write_text(json.dumps(changed))
    report = verify(tmp_path / "out", against=source, statistics=stats)
    codes = [p.name for p in report.problems if p.check == "weights"]
    assert len(codes) == 3 * 3 - 1
    assert all(name.endswith("weight_packed") for name in codes)


def test_a_quantized_source_is_rounded_by_what_it_decodes_to(source, measure, tmp_path):
    convert(source, tmp_path / "fp8", format="fp8_block")
    stats = measure(tmp_path / "fp8", tmp_path / "stats", hessian=True)
    out = tmp_path / "out"
    result = convert(tmp_path / "fp8", out, format="mxfp4", options=GPTQ, statistics=stats)
    assert all(error.ratio < 0.9 for error in result.gptq_errors)
    report = verify(out, against=tmp_path / "fp8", statistics=stats)
    assert report.ok, report.problems


def test_codes_without_statistics_are_the_nearest_and_named(make_checkpoint, measure, tmp_path):
    source = make_checkpoint(model_type="deepseek_v3")
    stats = measure(source, tmp_path / "stats", hessian=True)
    rule = {"roles": ["shared_experts", "routed_experts"], "format": "nvfp4", "options": GPTQ}
    recipe = Recipe.model_validate({"rules": [rule]})
    result = convert(source, tmp_path / "out", recipe=recipe, statistics=stats)
    layers, found = Statistics.load(stats).layers, set()
    for unit in result.plan.units:
        role = result.plan.model.roles[unit.name]
        rounded = unit.rounding is not None
        found.add((role.role, role.layer in layers, unit.options["search"], rounded))
    assert found == {
        ("routed_experts", True, "weighted", True),
        ("routed_experts", False, "gaussian", False),  # multi-token prediction
        ("shared_experts", True, "none", False),
        ("shared_experts", False, "none", False),
    }
    said = [w for w in result.plan.warnings if "statistics" in w]
    assert ["multi-token prediction" in w for w in said] == [True, False]
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert report.ok, report.problems


def test_gptq_needs_second_moments(source, measure, tmp_path):
    given = {"format": "mxfp4", "options": GPTQ}
    with pytest.raises(RecipeError, match=r"second moments.*calibrate --hessian.*--statistics"):
        convert(source, tmp_path / "out", **given)
    without = measure(source, tmp_path / "without")
    with pytest.raises(StatisticsError, match=r"these statistics have none.*calibrate --hessian"):
        convert(source, tmp_path / "out", statistics=without, **given)
    assert not (tmp_path / "out").exists()


def test_damaged_second_moments_are_found_before_they_are_used(source, measure, tmp_path):
    stats = measure(source, tmp_path / "stats", hessian=True)
    data = bytearray(stats.read_bytes())
    data[-1] ^= 1  # of the last expert's second moments
    stats.write_bytes(data)
    with pytest.raises(StatisticsError, match=r"layer 0 was damaged: its SHA-256"):
        convert(source, tmp_path / "out", format="mxfp4", options=GPTQ, statistics=stats)


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("mxfp4", {"rounding": "best"}, "rounding = 'best', but must be one of: nearest, gptq"),
        ("mxfp4", {"sale": "1"}, "no option 'sale'; its options: scale_rule, search, rounding"),
        ("mxfp4", {"column_order": "activation"}, "in which order GPTQ rounds columns; add"),
        ("fp8_channel", GPTQ, "fp8_channel has no option 'rounding'; its options: scale"),
        ("bf16", GPTQ, "bf16 has no option 'rounding'; its options: none"),
    ],
)
def test_wrong_options_are_refused(source, tmp_path, format, options, message):
    with pytest.raises(RecipeError, match=message):
        convert(source, tmp_path / "out", format=format, options=options)


def test_another_device_is_for_gptq_only_and_must_be_there(source, stats, tmp_path):
    with pytest.raises(RecipeError, match=r"device 'cuda' is where GPTQ computes, but nothing is"):
        convert(source, tmp_path / "out", format="mxfp4", device="cuda")
    given = {"format": "mxfp4", "options": GPTQ, "statistics": stats}
    with pytest.raises(UnsupportedError, match="device 'nothing' cannot be used"):
        convert(source, tmp_path / "out", device="nothing", **given)
    with pytest.raises(UnsupportedError, match=r"device 'meta' is of type meta, but GPTQ computes"):
        convert(source, tmp_path / "out", device="meta", **given)
    with pytest.raises(ArgumentError, match=r"device 'cuda' with executor ray, but machines of"):
        convert(source, tmp_path / "out", device="cuda", executor="ray", **given)
    assert not (tmp_path / "out").exists()


def test_the_plan_says_why_a_gpu_rounds_without_its_kernel(source, stats, tmp_path, monkeypatch):
    asked = []

    def slow(element, device):
        asked.append((element.name, device.type))
        reason = f"{element.name} is not compiled"
        return ColumnRounder(round_columns=round_columns_in_torch, reason=reason)

    # Nothing is computed, so that any device will do.
    monkeypatch.setattr("moequant.conversion.pipeline.check_device", lambda *arguments: None)
    given = {"format": "mxfp4", "options": GPTQ, "statistics": stats, "dry_run": True}

    def warnings():
        plan = convert(source, tmp_path / "out", device="cpu:0", **given).plan
        return [warning for warning in plan.warnings if "GPTQ on cpu:0" in warning]

    monkeypatch.setattr("moequant.conversion.gptq_units.column_rounder", slow)
    (warning,) = warnings()
    assert warning.endswith("its kernel, which cannot be used: e2m1 is not compiled")
    assert asked == [("e2m1", "cpu")]
    fast = ColumnRounder(round_columns=round_columns_in_torch)
    monkeypatch.setattr("moequant.conversion.gptq_units.column_rounder", lambda *arguments: fast)
    assert warnings() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("order", ["stored", "activation"])
@pytest.mark.parametrize("format", FORMATS)
def test_on_a_gpu_the_codes_are_those_that_verify_expects(source, stats, tmp_path, format, order):
    options = {**GPTQ, "column_order": order}
    given = {"format": format, "options": options, "statistics": stats, "workers": 8}
    result = convert(source, tmp_path / "out", device="cuda", **given)
    assert {error.device for error in result.gptq_errors} == {torch.cuda.get_device_name()}
    assert all(error.ratio < 0.9 for error in result.gptq_errors)
    assert not [warning for warning in result.plan.warnings if "its kernel" in warning]
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert report.ok, report.problems


def test_options_are_refused_beside_a_recipe(source, tmp_path):
    with pytest.raises(RecipeError, match="options rounding are given beside a recipe"):
        convert(source, tmp_path / "out", recipe="mxfp4-experts", options=GPTQ)


def test_searches_before_gptq_are_not_warned_of(source, stats, tmp_path):
    options = {**GPTQ, "scale_rule": "mse"}
    plan = convert(
        source, tmp_path, format="mxfp4", options=options, statistics=stats, dry_run=True
    ).plan
    assert not [warning for warning in plan.warnings if "KL divergence" in warning]
