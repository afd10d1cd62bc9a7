"""Conversions whose scales are searched by mean squares that the weights predict."""

from __future__ import annotations

import json

import pytest
import torch

from moequant.act_fn import SILU
from moequant.conversion import Recipe, convert, plan_checkpoint
from moequant.conversion.plan import make_plan
from moequant.errors import CheckpointError, RecipeError, StatisticsError, UnsupportedError
from moequant.formats import CONVERTIBLE, get_format
from moequant.statistics import intermediate_mean_square
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

GAUSSIAN = {"search": "gaussian"}


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


def files(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def tensors(folder):
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def recipe(*rules):
    return Recipe.model_validate({"rules": rules})


EXPERTS = {"roles": ["routed_experts"], "format": "nvfp4", "options": GAUSSIAN}


def test_scales_are_those_of_the_norm_and_of_gate_and_up(source, tmp_path):
    result = convert(source, tmp_path / "out", format="nvfp4", options=GAUSSIAN)
    before, found = tensors(source), tensors(tmp_path / "out")
    checked = 0
    for layer in range(2):
        norm = before[f"model.layers.{layer}.post_attention_layernorm.weight"]
        hidden = norm.float() ** 2
        for expert in range(4):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (before[f"{at}.{p}_proj.weight"] for p in ("gate", "up", "down"))
            inner = intermediate_mean_square(gate, up, hidden, SILU)
            fused = {"gate": gate, "up": up}
            for weights, square in ((fused, hidden), ({"down": down}, inner)):
                wanted = get_format("nvfp4").quantize_fused(
                    [*weights.values()],
                    {"search": "weighted"},
                    names=[*weights],
                    mean_squares=[square] * len(weights),
                )
                for projection, q in zip(weights, wanted, strict=True):
                    stored = result.plan.dialect.to_disk(f"{at}.{projection}_proj", q)
                    for name, tensor in stored.items():
                        one, other = (
                            t.reshape(-1).view(torch.uint8) for t in (found[name], tensor)
                        )
                        assert torch.equal(one, other), name
                        checked += 1
    assert checked == 2 * 4 * 3 * 3
    report = verify(tmp_path / "out", against=source)
    assert report.ok, report.problems
    assert report.method == "bytes"
    record = json.loads((tmp_path / "out" / "moequant.json").read_text())
    assert record["recipe"]["rules"][0]["options"] == GAUSSIAN


def test_bytes_depend_neither_on_workers_nor_on_the_quantizer(source, tmp_path, monkeypatch):
    for workers in (1, 5):
        convert(source, tmp_path / str(workers), format="nvfp4", options=GAUSSIAN, workers=workers)
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    convert(source, tmp_path / "torch", format="nvfp4", options=GAUSSIAN)
    assert files(tmp_path / "1") == files(tmp_path / "5") == files(tmp_path / "torch")


def test_it_is_another_plan_than_a_weighted_search_or_none(source, measure, tmp_path):
    convert(source, tmp_path / "none", format="nvfp4")
    convert(source, tmp_path / "gaussian", format="nvfp4", options=GAUSSIAN)
    stats = measure(source, tmp_path / "stats")
    convert(source, tmp_path / "weighted", format="nvfp4", statistics=stats)
    found = [files(tmp_path / name) for name in ("none", "gaussian", "weighted")]
    assert all(one != other for one, other in zip(found, found[1:] + found[:1], strict=True))


def test_a_quantized_source_is_decoded_for_the_prediction(source, tmp_path):
    convert(source, tmp_path / "fp8", format="fp8_block")
    out = tmp_path / "out"
    convert(tmp_path / "fp8", out, format="nvfp4", options=GAUSSIAN)
    report = verify(out, against=tmp_path / "fp8")
    assert report.ok, report.problems


def test_multi_token_prediction_has_norms_too_and_shared_experts_are_refused(
    make_checkpoint, tmp_path
):
    source = make_checkpoint(model_type="deepseek_v3")
    result = convert(source, tmp_path / "out", format="nvfp4", options=GAUSSIAN)
    assert {unit.options["search"] for unit in result.plan.units} == {"gaussian"}
    assert verify(tmp_path / "out", against=source).ok
    shared = {**EXPERTS, "roles": ["shared_experts", "routed_experts"]}
    with pytest.raises(RecipeError, match=r"shared_experts.*predicts the inputs of routed experts"):
        convert(source, tmp_path / "shared", recipe=recipe(shared))


def test_experts_with_biases_are_refused(make_checkpoint, tmp_path):
    source = make_checkpoint(model_type="gpt_oss")
    with pytest.raises(UnsupportedError, match=r'search = "gaussian" .*gpt_oss'):
        convert(source, tmp_path / "out", format="nvfp4", options=GAUSSIAN)


def test_a_norm_that_is_missing_or_of_another_size_is_refused(source):
    checkpoint, name = Checkpoint.open(source), "model.layers.1.post_attention_layernorm.weight"
    others = {n: info for n, info in checkpoint.tensors.items() if n != name}
    wrong = checkpoint.tensors[name]._replace(shape=(2, 128))
    for tensors, said in ((others, "missing"), ({**others, name: wrong}, r"shape \[2, 128\]")):
        with pytest.raises(
            CheckpointError, match=rf"{name}: {said}, but must be the weight of a n"
        ):
            make_plan(tensors, checkpoint.config, checkpoint.file_bytes, recipe(EXPERTS))


@pytest.mark.parametrize("format", [n for n in CONVERTIBLE if n != "nvfp4"])
def test_other_formats_have_no_such_search(source, tmp_path, format):
    with pytest.raises(RecipeError, match=r"search.*must be one of|has no option 'search'"):
        convert(source, tmp_path / "out", format=format, options=GAUSSIAN)


def test_statistics_beside_it_are_not_used(source, measure, tmp_path):
    stats = measure(source, tmp_path / "stats")
    with pytest.raises(StatisticsError, match="nothing uses these statistics"):
        convert(source, tmp_path / "out", format="nvfp4", options=GAUSSIAN, statistics=stats)
    # Unless for something else.
    convert(
        source,
        tmp_path / "out",
        format="nvfp4",
        options=GAUSSIAN,
        statistics=stats,
        activation_scales="statistics",
    )
    assert verify(tmp_path / "out", against=source, statistics=stats).ok


def test_the_plan_counts_what_is_read_once_more(source):
    checkpoint = Checkpoint.open(source)
    one, other = (
        plan_checkpoint(checkpoint, Recipe.for_format("nvfp4", options)).peak_bytes(1)
        for options in ({"search": "mse"}, GAUSSIAN)
    )
    assert other - one > 2 * 256 * 256 * 2
