from __future__ import annotations

import copy
import json
from functools import reduce
from operator import getitem

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli

TIME = {"median_us": 20.0, "p20_us": 19.0, "p80_us": 21.0}
CELL = {
    "tokens": 8, "times": {"moequant": TIME, "triton": dict(TIME)},
    "refusals": {"vllm": "vllm is not installed"},
    "bytes_moved": 4e7, "tb_per_s": 2.0, "tflops": 3.0, "floor_us": 10.0, "share_of_floor": 0.5,
}  # fmt: skip
DOCUMENT = {
    "shape": "qwen3-30b", "format": "fp8_block", "backend": "sm90_fp8_block",
    "machine": {"gpu": "a GPU", "torch": "2"},
    "ceilings": {"read_tb_per_s": 4.0, "fp8_tflops": 1000.0, "bf16_tflops": 500.0},
    "cells": [CELL],
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli, ["bench", "experts", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(DOCUMENT))
    return path


def test_a_saved_run_is_shown_again(saved):
    result = run("--from", saved)
    assert result.exit_code == 0
    assert "50%" in result.stdout
    assert "vllm was not timed: vllm is not installed" in result.stdout
    assert json.loads(run("--from", saved, "--json").stdout) == DOCUMENT


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
            assert "x.json: not what `moequant bench experts --json` prints: " in shown.stderr


def test_what_is_wrong_is_named(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(with_value(("cells", 0, "times", "triton", "p20_us"), "fast")))
    assert "run.cells[0].times.triton.p20_us is no positive number" in run("--from", file).stderr


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "8,-1"])
def test_tokens_are_a_list_of_numbers(tokens):
    result = run("--shape", "qwen3-30b", "--tokens", tokens)
    assert result.exit_code == 2
    assert "is not a list such as 1,8,512" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--shape", "qwen3-30b", "--from", "x.json"]])
def test_it_measures_or_shows(arguments):
    assert "give --shape to measure, or --from" in run(*arguments).stderr


def test_an_unknown_shape_is_refused():
    result = run("--shape", "qwen9")
    assert result.exit_code == 4
    assert "there is no shape 'qwen9'" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so():
    result = run("--shape", "qwen3-30b")
    assert result.exit_code == 4
    assert "device 'cuda' cannot be used" in result.stderr


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
