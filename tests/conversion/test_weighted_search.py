"""Conversions with statistics: what uses them, and that outputs stay verified and repeatable."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from moequant.conversion import Recipe, convert, plan_checkpoint
from moequant.errors import MoequantError, RecipeError, StatisticsError
from moequant.formats import CONVERTIBLE
from moequant.statistics import (
    Statistics,
)
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

WEIGHTED = [n for n, f in CONVERTIBLE.items() if "weighted" in f.options.get("search", ())]
MIXED = """
[[rules]]
roles = ["shared_experts", "routed_experts"]
format = "nvfp4"
"""


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(scope="module")
def stats(source, measure, tmp_path_factory):
    return measure(source, tmp_path_factory.mktemp("statistics") / "stats")


def tensors(folder):
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def files(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def recipe(folder, text):
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("format", WEIGHTED)
def test_with_statistics_each_weight_is_quantized_by_those_of_its_expert(
    source, stats, tmp_path, format
):
    result = convert(source, tmp_path / "out", format=format, statistics=stats)
    measured, before, found = Statistics.load(stats), tensors(source), tensors(tmp_path / "out")
    checked = 0
    for unit in result.plan.units:
        fmt = CONVERTIBLE[format]
        names = [weight.info.name for weight in unit.weights]
        places = [result.plan.model.roles[name] for name in names]
        wanted = fmt.quantize_fused(
            [before[name] for name in names],
            {"search": "weighted"},
            names=names,
            mean_squares=[
                measured.input_mean_square(p.layer, p.expert, p.projection) for p in places
            ],
        )
        for weight, q in zip(unit.weights, wanted, strict=True):
            for name, tensor in result.plan.dialect.to_disk(weight.module, q).items():
                one, other = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
                assert torch.equal(one, other), name
                checked += 1
    assert checked >= 2 * 2 * 4 * 3  # codes and scales of three projections
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert report.ok, report.problems
    assert report.method == "bytes"


PREDICTION_LAYER = 2
"""The layer for multi-token prediction of a small DeepSeek-V3, which has two others."""


@pytest.fixture(scope="module")
def predicting(make_checkpoint):
    return make_checkpoint(model_type="deepseek_v3")


@pytest.fixture(scope="module")
def predicting_stats(predicting, measure, tmp_path_factory):
    return measure(predicting, tmp_path_factory.mktemp("prediction") / "stats", hessian=True)


def of_layer(folder, layer):
    checkpoint = Checkpoint.open(folder)
    names = [n for n in checkpoint.tensors if f"layers.{layer}.mlp.experts." in n]
    return {name: checkpoint.read(name) for name in names}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one
    )


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
@pytest.mark.parametrize("format", WEIGHTED)
def test_layers_for_multi_token_prediction_are_quantized_without_data_and_said_to_be(
    predicting, predicting_stats, tmp_path, format, rounding
):
    options = {"rounding": rounding}
    out = tmp_path / "out"
    found = convert(
        predicting, out, format=format, options=options, statistics=predicting_stats
    ).plan
    search = "gaussian" if format == "nvfp4" else "none"
    named = {"search": search} if format == "nvfp4" else {}
    convert(predicting, tmp_path / "apart", format=format, options=named)
    assert same(of_layer(out, PREDICTION_LAYER), of_layer(tmp_path / "apart", PREDICTION_LAYER))
    searches = {(u.weights[0].expert[0], u.options["search"]) for u in found.units}
    assert searches == {(1, "weighted"), (PREDICTION_LAYER, search)}
    said = [w for w in found.warnings if "multi-token prediction" in w]
    how = f'search = "{search}"' if search == "gaussian" else "scales without a search"
    assert len(said) == 1
    assert said[0].startswith("layers 2, for multi-token prediction, have no statistics")
    assert f"their 12 weights into {format}, such as model.layers.2.mlp.experts.0." in said[0]
    assert how in said[0]
    report = verify(out, against=predicting, statistics=predicting_stats)
    assert report.ok, report.problems


def test_where_weights_predict_nothing_such_layers_are_rounded_to_nearest(
    make_checkpoint, measure, tmp_path
):
    source = make_checkpoint(model_type="deepseek_v3", config={"hidden_act": "tanh"})
    stats = measure(source, tmp_path / "stats")
    plan = plan_checkpoint(
        Checkpoint.open(source), Recipe.for_format("nvfp4"), statistics=Statistics.load(stats)
    )
    searches = {u.weights[0].expert[0]: u.options["search"] for u in plan.units}
    assert searches == {1: "weighted", PREDICTION_LAYER: "none"}
    assert any("get scales without a search" in w for w in plan.warnings)


def test_the_record_names_the_statistics(source, stats, tmp_path):
    convert(source, tmp_path / "out", format="nvfp4", statistics=stats)
    record = json.loads((tmp_path / "out" / "moequant.json").read_text())
    assert record["statistics"]["sha256"] == Statistics.load(stats).digest
    assert record["statistics"]["data"]["tokens"] == 100


def test_without_statistics_nothing_is_recorded_and_the_plan_is_as_before(source, tmp_path):
    result = convert(source, tmp_path / "out", format="nvfp4")
    assert "statistics" not in json.loads((tmp_path / "out" / "moequant.json").read_text())
    assert {unit.options["search"] for unit in result.plan.units} == {"none"}


@pytest.mark.parametrize("format", WEIGHTED)
def test_bytes_depend_neither_on_workers_nor_on_the_quantizer(
    source, stats, tmp_path, format, monkeypatch
):
    for workers in (1, 5):
        out = tmp_path / str(workers)
        convert(source, out, format=format, statistics=stats, workers=workers)
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    convert(source, tmp_path / "torch", format=format, statistics=stats)
    assert files(tmp_path / "1") == files(tmp_path / "5") == files(tmp_path / "torch")


def test_verify_needs_the_same_statistics(source, stats, tmp_path, measure):
    convert(source, tmp_path / "out", format="nvfp4", statistics=stats)
    with pytest.raises(StatisticsError, match=r"converted with statistics, SHA-256 .*--stat"):
        verify(tmp_path / "out", against=source)
    other = measure(source, tmp_path / "other", seed=1)
    with pytest.raises(
        StatisticsError, match=r"other: its SHA-256 of the header .* give that file"
    ):
        verify(tmp_path / "out", against=source, statistics=other)
    convert(source, tmp_path / "plain", format="nvfp4")
    with pytest.raises(StatisticsError, match="plain was not converted with statistics"):
        verify(tmp_path / "plain", against=source, statistics=stats)


def test_verify_finds_scales_that_other_statistics_would_give(source, stats, tmp_path, measure):
    convert(source, tmp_path / "out", format="nvfp4", statistics=stats)
    other = measure(source, tmp_path / "other", seed=1)
    convert(source, tmp_path / "wrong", format="nvfp4", statistics=other)
    record = json.loads((tmp_path / "out" / "moequant.json").read_text())
    for file in files(tmp_path / "wrong"):
        shutil.copy(tmp_path / "wrong" / file, tmp_path / "out" / file)
    wrong = json.loads((tmp_path / "wrong" / "moequant.json").read_text())
    (tmp_path / "out" / "moequant.json").write_text(
        json.dumps(record | {"shards": wrong["shards"]})
    )
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert {problem.check for problem in report.problems} == {"weights"}


class _StopError(Exception):
    pass


def test_an_interrupted_conversion_continues_with_its_statistics_only(
    source, stats, tmp_path, monkeypatch, measure
):
    out, settings = tmp_path / "out", {"format": "nvfp4", "max_shard_size": "300KB"}
    convert(source, tmp_path / "whole", statistics=stats, **settings)

    def stop(*arguments):
        raise _StopError

    with monkeypatch.context() as patch:
        patch.setattr("moequant.conversion.planned_conversion.commit", stop)
        with pytest.raises(_StopError):
            convert(source, out, statistics=stats, **settings)
    other = measure(source, tmp_path / "other", seed=1)
    for given in ({}, {"statistics": other}):
        with pytest.raises(MoequantError, match=r"into nvfp4, with the statistics of .*\w, with"):
            convert(source, out, **settings, **given)
    result = convert(source, out, statistics=stats, **settings)
    assert result.resumed_shards == len(result.plan.shards)
    assert files(out) == files(tmp_path / "whole")
    with pytest.raises(MoequantError, match="with the statistics of header SHA-256"):
        convert(source, out, statistics=other, **settings)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "mixtral"}, "of a model with architecture mixtral"),
        ({"experts": 3}, "of a model with experts 3"),
        ({"hidden": 512}, "of a model with hidden size 512"),
        ({"intermediate": 512}, "of a model with intermediate size 512"),
        ({"source": {"config_sha256": "0", "sample_sha256": "0"}}, "with other weights"),
    ],
)
def test_statistics_of_another_model_are_refused(source, tmp_path, changed, message, measure):
    other = measure(source, tmp_path / "other", **changed)
    for dry_run in (True, False):
        with pytest.raises(StatisticsError, match=f"{message}.*calibrate"):
            convert(source, tmp_path / "out", format="nvfp4", statistics=other, dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def test_statistics_of_the_same_shapes_with_other_weights_are_refused(
    make_checkpoint, stats, tmp_path
):
    twin = make_checkpoint(seed=1)
    with pytest.raises(StatisticsError, match="measured on a checkpoint with other weights"):
        convert(twin, tmp_path / "out", format="nvfp4", statistics=stats)


def test_a_weighted_search_without_statistics_is_refused(source, tmp_path):
    text = '[[rules]]\nroles = ["routed_experts"]\nformat = "nvfp4"\noptions = {search="weighted"}'
    with pytest.raises(RecipeError, match="needs statistics: measure them with `moequant calib"):
        convert(source, tmp_path / "out", recipe=recipe(tmp_path, text))


@pytest.mark.parametrize(
    "rule",
    [
        'format = "fp8_channel"',
        'format = "nvfp4"\noptions = {search = "mse"}',
        'format = "nvfp4"\noptions = {search = "none"}',
        'format = "mxfp4"\noptions = {scale_rule = "mse"}',
    ],
)
def test_statistics_that_nothing_uses_are_refused(source, stats, tmp_path, rule):
    path = recipe(tmp_path, f'[[rules]]\nroles = ["routed_experts"]\n{rule}\n')
    with pytest.raises(StatisticsError, match="nothing uses these statistics"):
        convert(source, tmp_path / "out", recipe=path, statistics=stats)


def test_weights_without_statistics_are_quantized_without_and_named(
    make_checkpoint, tmp_path, measure
):
    source = make_checkpoint(model_type="deepseek_v3")
    stats = measure(source, tmp_path / "stats")
    path = recipe(tmp_path, MIXED)
    result = convert(source, tmp_path / "out", recipe=path, statistics=stats)
    layers = Statistics.load(stats).layers
    found = set()
    for unit in result.plan.units:
        role = result.plan.model.roles[unit.name]
        found.add((role.role, role.layer in layers, unit.options["search"]))
    assert found == {
        ("routed_experts", True, "weighted"),
        ("routed_experts", False, "gaussian"),  # multi-token prediction
        ("shared_experts", True, "none"),
        ("shared_experts", False, "none"),
    }
    warnings = [w for w in result.plan.warnings if "do not use the statistics" in w]
    assert len(warnings) == 1
    assert "weights of shared_experts into nvfp4" in warnings[0]
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert report.ok, report.problems


def test_an_explicit_weighted_search_is_what_statistics_make_the_default(source, stats, tmp_path):
    rule = '[[rules]]\nroles = ["routed_experts"]\nformat = "w4a8"\noptions = {search="weighted"}'
    convert(source, tmp_path / "named", recipe=recipe(tmp_path, rule), statistics=stats)
    convert(source, tmp_path / "default", format="w4a8", statistics=stats)
    assert files(tmp_path / "named") == files(tmp_path / "default")


@pytest.mark.parametrize(
    ("format", "options", "warned"),
    [
        ("mxfp4", {"scale_rule": "mse"}, "from 0.265 to 0.278"),
        ("w4a8", {"search": "mse"}, "from 0.270 to 0.291"),
        ("nvfp4", {"search": "mse"}, None),
        ("mxfp4", {}, None),
        ("w4a8", {}, None),
    ],
)
def test_searches_that_raise_the_models_error_are_warned_of(source, format, options, warned):
    rule = {"roles": ["routed_experts"], "format": format, "options": options}
    plan = plan_checkpoint(Checkpoint.open(source), Recipe.model_validate({"rules": [rule]}))
    found = [warning for warning in plan.warnings if "KL divergence" in warning]
    assert len(found) == (warned is not None)
    assert all(warned in warning for warning in found)


def test_the_plan_counts_the_layers_of_statistics_in_memory(source, stats):
    plans = [
        plan_checkpoint(Checkpoint.open(source), Recipe.for_format("nvfp4"), (), given)
        for given in (None, Statistics.load(stats))
    ]
    # Two layers of five rows (four experts and the pooled one) of 256 + 256 numbers, and a few.
    assert plans[1].peak_bytes(1) - plans[0].peak_bytes(1) == 2 * 4 * 5 * (256 + 256 + 4)
