"""Which layers stay as they are, because quantizing them costs most by the statistics."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli
from moequant.conversion import convert
from moequant.errors import RecipeError
from moequant.formats import dequantize, get_format
from moequant.statistics import Statistics
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

LAYERS, EXPERTS = 4, 4
NVFP4 = {"format": "nvfp4"}


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint(layers=LAYERS, hidden=128, intermediate=128)


@pytest.fixture(scope="module")
def stats(source, measure, tmp_path_factory):
    return measure(source, tmp_path_factory.mktemp("s") / "stats")


def costs_by_definition(source, stats):
    """The costs of nvfp4 by weighted scales, as docs/conversion.md defines them, in float64."""
    checkpoint, measured = Checkpoint.open(source), Statistics.load(stats)
    costs, stream = [], 0.0
    for layer in range(LAYERS):
        sums = {p: [0.0, 0.0] for p in ("gate", "up", "down")}
        for expert in range(EXPERTS):
            w, squares = {}, {}
            for p in sums:
                name = f"model.layers.{layer}.mlp.experts.{expert}.{p}_proj.weight"
                w[p] = checkpoint.read(name)
                squares[p] = measured.input_mean_square(layer, expert, p)
            for fused in (("gate", "up"), ("down",)):
                found = get_format("nvfp4").quantize_fused(
                    [w[p] for p in fused],
                    {"search": "weighted"},
                    names=fused,
                    mean_squares=[squares[p] for p in fused],
                )
                for p, q in zip(fused, found, strict=True):
                    difference = dequantize(q).double() - w[p].double()
                    t, s = measured.tokens(layer, expert), squares[p].double()
                    sums[p][0] += t * float((difference**2 * s).sum())
                    sums[p][1] += t * float((w[p].double() ** 2 * s).sum())
        stream += sums["down"][1]
        relative = sum(error / signal for error, signal in sums.values())
        costs.append(relative * sums["down"][1] / stream)
    return costs


@pytest.mark.parametrize("count", [1, 3])
def test_the_layers_that_cost_most_are_kept(source, stats, tmp_path, count):
    costs = costs_by_definition(source, stats)
    ordered = sorted(range(LAYERS), key=lambda layer: -costs[layer])[:count]
    result = convert(source, tmp_path / "out", **NVFP4, statistics=stats, keep_sensitive=count)
    assert [one.layer for one in result.kept] == ordered
    for one in result.kept:
        assert one.cost == pytest.approx(costs[one.layer], rel=1e-6)
    layers = {result.plan.model.roles[unit.name].layer for unit in result.plan.units}
    assert layers == {*range(LAYERS)} - {*ordered}
    plain = convert(source, tmp_path / "plain", **NVFP4, statistics=stats)
    grown = result.plan.output_bytes - plain.plan.output_bytes
    # Headers are of other lengths.
    assert abs(grown - sum(one.extra_bytes for one in result.kept)) < 20_000
    report = verify(tmp_path / "out", against=source, statistics=stats)
    assert report.ok, report.problems
    assert report.method == "bytes"


def test_the_record_names_the_layers_so_that_verify_needs_no_costs(source, stats, tmp_path):
    result = convert(source, tmp_path / "out", **NVFP4, statistics=stats, keep_sensitive=2)
    record = json.loads((tmp_path / "out" / "moequant.json").read_text())
    kept = [rule["layers"] for rule in record["recipe"]["rules"] if rule["format"] == "keep"]
    assert kept == sorted(str(one.layer) for one in result.kept)


def test_a_size_is_filled_with_the_layers_that_cost_most(source, stats, tmp_path):
    one = convert(
        source, tmp_path / "a", **NVFP4, statistics=stats, keep_sensitive=1, dry_run=True
    ).kept[0]
    settings = {**NVFP4, "statistics": stats, "dry_run": True}
    size = f"{2 * one.extra_bytes / 1000:.3f}KB"
    result = convert(source, tmp_path / "b", **settings, keep_sensitive=size)
    assert len(result.kept) == 2
    assert result.kept[0] == one
    with pytest.raises(RecipeError, match=r"keeps 0 of the 4 .* or a size of at least \d+ bytes"):
        convert(source, tmp_path / "c", **settings, keep_sensitive="1KB")


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        (1, False, r"--keep-sensitive \(keep_sensitive=\) '1' needs statistics: measure them with"),
        (0, True, "'0' is neither a number of layers above zero nor a size; give one, such as 2"),
        (-1, True, "'-1' is neither a number of layers above zero nor a size"),
        ("1KB", True, "keeps 0 of the 4 calibrated layers .* a number from 1 to 3"),
        (4, True, "keeps 4 of the 4 calibrated layers"),
        ("some", True, "'some' is neither a number of layers above zero nor a size"),
    ],
)
def test_what_keeps_nothing_or_all_is_refused(source, stats, tmp_path, wanted, given, message):
    with pytest.raises(RecipeError, match=message):
        convert(
            source,
            tmp_path / "out",
            **NVFP4,
            statistics=stats if given else None,
            keep_sensitive=wanted,
        )
    assert not (tmp_path / "out").exists()


def test_the_choice_does_not_depend_on_workers_and_a_run_continues(source, stats, tmp_path):
    settings = {**NVFP4, "statistics": stats, "keep_sensitive": 2}
    chosen = {
        convert(source, tmp_path / "out", **settings, workers=workers).kept for workers in (1, 5)
    }
    assert len(chosen) == 1
    again = convert(source, tmp_path / "out", **settings)
    assert again.state == "already converted"


def test_with_static_scales_kept_layers_have_none(source, stats, tmp_path):
    result = convert(
        source,
        tmp_path / "out",
        **NVFP4,
        statistics=stats,
        keep_sensitive=1,
        activation_scales="statistics",
    )
    (kept,) = result.kept
    names = Checkpoint.open(tmp_path / "out").tensors
    scales = {name.split(".")[2] for name in names if name.endswith("input_global_scale")}
    assert scales == {str(layer) for layer in range(LAYERS) if layer != kept.layer}
    assert verify(tmp_path / "out", against=source, statistics=stats).ok


@pytest.mark.parametrize(
    ("format", "options"),
    [("fp8_channel", {}), ("mxfp8", {}), ("fp8_tensor", {}), ("nvfp4", {"search": "none"})],
)
def test_statistics_that_only_choose_layers_are_not_needed_again(
    source, stats, tmp_path, format, options
):
    settings = {"format": format, "options": options}
    given = {**settings, "statistics": stats, "keep_sensitive": 1}
    result = convert(source, tmp_path / "out", **given)
    assert len(result.kept) == 1
    assert result.kept[0].cost > 0
    assert "statistics" not in json.loads((tmp_path / "out" / "moequant.json").read_text())
    report = verify(tmp_path / "out", against=source)
    assert report.ok, report.problems
    assert convert(source, tmp_path / "out", **given).state == "already converted"
    convert(source, tmp_path / "all", **settings)
    kept = f"layers.{result.kept[0].layer}."
    same = Checkpoint.open(tmp_path / "all")
    for name in (ours := Checkpoint.open(tmp_path / "out")).tensors:
        if kept not in name:
            assert torch.equal(ours.read(name), same.read(name)), name


def test_an_expert_that_saw_no_token_does_not_count(source, measure, tmp_path, monkeypatch):
    """Of four experts, the first saw none; with two a layer, the last two are compared."""
    stats = measure(source, tmp_path / "stats")
    read = []
    from moequant.conversion import sensitivity

    before = sensitivity.quantize_alone
    monkeypatch.setattr(sensitivity, "EXPERTS", 2)
    monkeypatch.setattr(
        sensitivity, "quantize_alone", lambda s, u, *o: read.append(u.name) or before(s, u, *o)
    )
    convert(source, tmp_path / "out", **NVFP4, statistics=stats, keep_sensitive=1, dry_run=True)
    assert {name.split(".")[5] for name in read} == {"2", "3"}
    assert len(read) == 2 * 2 * LAYERS


def test_the_command_shows_which_layers_and_what_they_cost(source, stats, tmp_path):
    args = ["--format", "nvfp4", "--statistics", str(stats), "--keep-sensitive", "2"]
    out = [str(source), str(tmp_path / "out")]
    planned = CliRunner().invoke(cli, ["convert", *out, *args, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert "kept layer   cost if quantized" in planned.stdout
    shown = CliRunner().invoke(cli, ["convert", *out, *args, "--json"])
    document = json.loads(shown.stdout)
    assert len(document["kept_layers"]) == 2
    assert document["kept_layers"][0]["cost"] >= document["kept_layers"][1]["cost"] > 0
    assert f"--statistics {stats}" in document["next"]
    nearest = CliRunner().invoke(
        cli, ["convert", *out, *args, "--option", "search=none", "--json", "--overwrite"]
    )
    assert "--statistics" not in json.loads(nearest.stdout)["next"]


def test_it_is_a_sum_of_squares_and_not_of_one_thread(source, stats, tmp_path):
    """The bits of the costs are the same with several intra-op threads in the process."""
    settings = {**NVFP4, "statistics": stats, "keep_sensitive": 1, "dry_run": True}
    one = convert(source, tmp_path / "a", **settings).kept
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert convert(source, tmp_path / "a", **settings).kept == one
    finally:
        torch.set_num_threads(before)


def test_rules_that_apply_to_nothing_have_the_numbers_of_the_users_file(source, stats, tmp_path):
    (tmp_path / "mine.toml").write_text(
        """
        [[rules]]
        roles = ["routed_experts"]
        format = "nvfp4"
        [[rules]]
        match = "no_such_tensor"
        format = "fp8_block"
        """
    )
    result = convert(
        source, tmp_path / "out", recipe=tmp_path / "mine.toml", statistics=stats,
        keep_sensitive=2, dry_run=True,
    )  # fmt: skip
    about = [text for text in result.plan.warnings if "applies to no tensor" in text]
    assert about == ["rules[1] of the recipe applies to no tensor of this checkpoint"]
