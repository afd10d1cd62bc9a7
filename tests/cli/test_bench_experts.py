from __future__ import annotations

import copy
import json
import os
from functools import reduce
from operator import getitem
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli
from moequant.errors import NumericsError

TIME = {"median_us": 20.0, "p20_us": 19.0, "p80_us": 21.0}
CELL = {
    "tokens": 8, "times": {"moequant": TIME, "triton": {**TIME, "median_us": 33.3}},
    "tiling": {"rows": 128, "split13": 1, "split2": 2, "pair": True, "gather": False},
    "bytes_moved": 4e7, "tb_per_s": 2.0, "tflops": 3.0, "floor_us": 10.0, "share_of_floor": 0.5,
    "stages_us": {"prepare": 3.25, "down": 9.5}, "host_us": 44.4,
}  # fmt: skip
LAYER = {
    "shape": "gpt-oss-120b", "experts": 128, "hidden": 2880, "intermediate": 2880, "topk": 4,
    "act_fn": "swigluoai", "biased": True, "backend": "sm90_fp8_block",
    "refusals": {"vllm": "vllm is not installed"}, "cells": [CELL],
}  # fmt: skip
DOCUMENT = {
    "measured": "2026-11-20", "method": "medians", "format": "fp8_block",
    "machine": {"gpu": "a GPU", "torch": "2"},
    "ceilings": {"read_tb_per_s": 4.0, "fp8_tflops": 1000.0, "bf16_tflops": 500.0},
    "layers": [LAYER],
}  # fmt: skip
PLAIN = {**CELL, "tokens": 1, "times": {"moequant": TIME}, "tiling": None, "stages_us": None,
         "host_us": None}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli, ["bench", "experts", *map(str, arguments)])


def lines_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(DOCUMENT))
    return path


def test_a_saved_run_is_shown_again(saved):
    result = run("--from", saved)
    assert result.exit_code == 0
    lines = lines_of(result.stdout)
    assert "8 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% 33.3 44 rows 128, split2 2, pair" in lines
    assert "8 3.2 9.5" in lines
    assert "intermediate 2880, swigluoai, biases; by sm90_fp8_block" in result.stdout
    assert "vllm was not timed: vllm is not installed" in result.stdout
    assert json.loads(run("--from", saved, "--json").stdout) == DOCUMENT


def test_what_was_not_measured_has_no_column_and_what_was_in_part_a_dash(saved):
    layers = [{**LAYER, "cells": [PLAIN]}, {**LAYER, "cells": [CELL, PLAIN]}]
    saved.write_text(json.dumps({**DOCUMENT, "layers": layers}))
    first, second = run("--from", saved).stdout.split("gpt-oss-120b: ")[1:]
    assert "host us" not in first
    assert "down us" not in first
    lines = lines_of(second)
    assert "1 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% - - -" in lines
    assert "1 - -" in lines


def test_a_saved_run_is_written_again(saved, tmp_path):
    assert run("--from", saved, "--output", tmp_path / "again.json").exit_code == 0
    assert json.loads((tmp_path / "again.json").read_text()) == DOCUMENT


def test_what_was_measured_before_an_error_is_in_the_file(monkeypatch, tmp_path):
    def bench_experts(shapes, measure, *, device, progress):
        assert list(shapes) == ["qwen3-30b", "8x256x128x2"]
        assert (measure.tokens, measure.against, device) == ([8], ["triton", "vllm"], "cuda")
        assert (measure.stages, measure.host) == (True, False)
        yield SimpleNamespace(document=lambda: DOCUMENT)
        raise NumericsError("wrong")

    monkeypatch.setattr("moequant.benchmarks.experts.bench_experts", bench_experts)
    result = run(
        "--shape", "qwen3-30b,8x256x128x2", "--tokens", "8", "--against", "triton,vllm",
        "--stages", "--output", tmp_path / "run.json",
    )  # fmt: skip
    assert result.exit_code != 0
    assert "wrong" in result.stderr
    assert json.loads((tmp_path / "run.json").read_text()) == DOCUMENT


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("no/x", "is no folder; make it first"),
        (".", "is a directory"),
        ("x" * 251, "cannot be written: File name too long"),
        ("pipe", "there already, and no file; choose another name"),
    ],
)
@pytest.mark.parametrize("command", [("bench", "experts"), ("tune",)])
@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, command, option, given, why
):
    if command == ("tune",):
        option = "--output"
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(
        cli, [*command, "--shape", "qwen3-30b", option, str(tmp_path / given)]
    )
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_file_that_is_there_is_left_until_there_is_another(tmp_path):
    (tmp_path / "run.json").write_text("before")
    assert run("--shape", "qwen9", "--output", tmp_path / "run.json").exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "before"


@pytest.mark.parametrize(
    "option",
    [["--tokens", "8"], ["--format", "nvfp4"], ["--backend", "triton"], ["--against", "triton"],
     ["--stages"], ["--host"], ["--device", "cuda"]],
    ids=lambda option: option[0],
)  # fmt: skip
def test_what_says_how_to_measure_does_not_go_with_a_saved_run(saved, option):
    result = run("--from", saved, *option)
    assert result.exit_code == 2
    assert f"{option[0]} goes with --shape, and not with --from" in result.stderr


def test_a_saved_run_is_drawn(saved, tmp_path):
    assert run("--from", saved, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"shape": 1}'])
def test_a_file_that_is_no_run_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    result = run("--from", tmp_path / "x.json")
    assert result.exit_code == 3
    assert "x.json" in result.stderr


def places(value, path=()):
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    for key, element in enumerate(value) if isinstance(value, list) else inside:
        yield from places(element, (*path, key))


def with_value(path, value):
    """DOCUMENT with another value at a path."""
    whole = {"": copy.deepcopy(DOCUMENT)}
    *way, last = ("", *path)
    reduce(getitem, way, whole)[last] = value
    return whole[""]


@pytest.mark.parametrize("path", [*places(DOCUMENT)], ids=lambda path: ".".join(map(str, path)))
def test_hostile_values_are_refused_or_shown(tmp_path, path):
    file = tmp_path / "x.json"
    for value in (None, [], {}, "x", -1, 0, float("nan"), True, 10**400, [1], {"gpu": 1}):
        file.write_text(json.dumps(with_value(path, value)))
        shown = run("--from", file)
        assert shown.exit_code in (0, 3), value
        if shown.exit_code:
            assert "x.json: not what `moequant bench experts --output` writes: " in shown.stderr


def test_what_is_wrong_is_named(tmp_path):
    file = tmp_path / "x.json"
    place = ("layers", 0, "cells", 0, "times", "triton", "p20_us")
    file.write_text(json.dumps(with_value(place, "fast")))
    wrong = "run.layers[0].cells[0].times.triton.p20_us is no number from 1e-09 to 1e+18"
    assert wrong in run("--from", file).stderr


def test_what_is_not_known_is_named(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**DOCUMENT, "more": float("nan")}))
    assert "run has 'more', which is not known" in run("--from", file).stderr


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "8,-1"])
def test_tokens_are_a_list_of_numbers(tokens):
    result = run("--shape", "qwen3-30b", "--tokens", tokens)
    assert result.exit_code == 2
    assert "is not a list such as 1,8,512" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--shape", "qwen3-30b", "--from", "x.json"]])
def test_it_measures_or_shows(arguments):
    assert "give --shape to measure, or --from" in run(*arguments).stderr


def test_an_unknown_shape_is_refused():
    result = run("--shape", "all,qwen9")
    assert result.exit_code == 4
    assert "there is no shape 'qwen9'" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so():
    result = run("--shape", "qwen3-30b")
    assert result.exit_code == 4
    assert "device 'cuda' cannot be used" in result.stderr
    assert "run this where there is a CUDA device" in result.stderr


@pytest.mark.parametrize(
    ("device", "message"), [("bogus", "device 'bogus' cannot be used"), ("cpu", "choose a CUDA")]
)
def test_another_device_is_refused(device, message):
    result = run("--shape", "qwen3-30b", "--device", device)
    assert result.exit_code == 4
    assert message in result.stderr


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr("moequant.benchmarks.plot.find_spec", lambda name: None)
    result = run("--shape", "qwen3-30b", "--plot", tmp_path / "x.png")
    assert result.exit_code == 4
    assert "pip install 'moequant[plot]'" in result.stderr


def test_a_plot_takes_the_place_of_no_document(saved, tmp_path):
    result = run("--from", saved, "--plot", saved)
    assert result.exit_code == 2
    assert "--plot and --from are both" in result.stderr
    assert json.loads(saved.read_text()) == DOCUMENT
    result = run("--from", saved, "--plot", tmp_path / "x", "--output", tmp_path / "x")
    assert result.exit_code == 2
    assert "--plot and --output are both" in result.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("where", ["value", "key"])
def test_text_that_no_file_can_hold_is_refused(saved, where):
    document = copy.deepcopy(DOCUMENT)
    document["machine"]["gpu" if where == "value" else "\ud800"] = "\ud800"
    saved.write_text(json.dumps(document))
    result = run("--from", saved)
    assert result.exit_code == 3
    assert "is no text; measure again" in result.stderr


def test_a_size_of_thousands_of_digits_is_no_shape():
    result = run("--shape", "9" * 5000 + "x1x1x1")
    assert result.exit_code == 4
    assert "there is no shape" in result.stderr
