from __future__ import annotations

import json
import os

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli
from moequant.errors import MoequantError, NumericsError

TIME = {"median_us": 20.0, "p20_us": 19.0, "p80_us": 21.0}
CELL = {
    "tokens": 8, "routing": "uniform", "experts_used": 8.0, "busiest_pairs": 5.0,
    "times": {"moequant": TIME, "triton": {**TIME, "median_us": 33.3}},
    "tiling": {"rows": 128, "split13": 1, "split2": 2, "pair": True, "gather": False},
    "bytes_moved": 4e7, "tb_per_s": 2.0, "tflops": 3.0, "floor_us": 10.0, "share_of_floor": 0.5,
    "to_uniform": 1.0,
    "stages_us": {"prepare": 3.25, "down": 9.5}, "host_us": 44.4,
}  # fmt: skip
LAYER = {
    "shape": "gpt-oss-120b", "experts": 128, "hidden": 2880, "intermediate": 2880, "topk": 4,
    "act_fn": "swigluoai", "biased": True, "backend": "sm90_fp8_block",
    "refusals": {"vllm": "vllm is not installed"}, "cells": [CELL],
}  # fmt: skip
DOCUMENT = {
    "measured": "2026-11-20", "method": "medians", "format": "fp8_block",
    "activations": "fp8_group128", "products": "fp8", "machine": {"gpu": "a GPU", "torch": "2"},
    "ceilings": {"read_tb_per_s": 4.0, "fp8_tflops": 1000.0, "bf16_tflops": 500.0},
    "layers": [LAYER],
}  # fmt: skip
PLAIN = {**CELL, "tokens": 1, "times": {"moequant": TIME}, "tiling": None, "stages_us": None,
         "host_us": None}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli, ["bench", "experts", *map(str, arguments)])


def lines_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def lines_text(*arguments):
    return "\n".join(lines_of(run(*arguments).stdout))


@pytest.fixture
def measured(monkeypatch):
    """measured(document): what every measurement gives from here on."""

    def measured(document):
        monkeypatch.setattr(
            "moequant.benchmarks.experts.bench_experts",
            lambda *_, **__: [document],
        )

    return measured


def test_what_was_measured_is_shown(measured):
    measured(DOCUMENT)
    result = run("--shape", "gpt-oss-120b")
    assert result.exit_code == 0
    lines = lines_of(result.stdout)
    assert "8 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% 33.3 44 rows 128, split2 2, pair" in lines
    assert "8 3.2 9.5" in lines
    assert "intermediate 2880, swigluoai, biases; by sm90_fp8_block" in result.stdout
    assert "vllm was not timed: vllm is not installed" in result.stdout
    assert json.loads(run("--shape", "gpt-oss-120b", "--json").stdout) == DOCUMENT


def test_routing_has_columns_where_it_is_not_all_uniform(measured):
    skewed = {**CELL, "routing": "skewed", "experts_used": 5.5, "busiest_pairs": 7.5,
              "to_uniform": 1.125}  # fmt: skip
    measured({**DOCUMENT, "layers": [{**LAYER, "cells": [CELL, {**skewed, "to_uniform": None}]}]})
    assert "8 skewed 6 8 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% - 33.3" in lines_text(
        "--shape", "gpt-oss-120b"
    )
    measured({**DOCUMENT, "layers": [{**LAYER, "cells": [CELL, skewed]}]})
    text = lines_text("--shape", "gpt-oss-120b")
    assert (
        "tokens routing experts busiest us p20 p80 moved TB/s TFLOPS floor us share x uniform"
        in text
    )
    assert "8 uniform 8 5 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% 1.00 33.3" in text
    assert "8 skewed 6 8 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% 1.12 33.3" in text
    assert "8 skewed 6 8 3.2 9.5" in text


def test_activations_and_the_rate_of_floors_are_said(measured):
    measured(DOCUMENT)
    text = run("--shape", "gpt-oss-120b").stdout
    assert "a GPU, fp8_block with activations in fp8_group128, 2026-11-20" in text
    assert "BF16 500 TFLOPS; floors with FP8" in text
    measured({**DOCUMENT, "activations": "none", "products": "bf16"})
    text = run("--shape", "gpt-oss-120b").stdout
    assert "a GPU, fp8_block, 2026-11-20" in text
    assert "floors with BF16" in text


def test_what_was_not_measured_has_no_column_and_what_was_in_part_a_dash(measured):
    layers = [{**LAYER, "cells": [PLAIN]}, {**LAYER, "cells": [CELL, PLAIN]}]
    measured({**DOCUMENT, "layers": layers})
    first, second = run("--shape", "all").stdout.split("gpt-oss-120b: ")[1:]
    assert "host us" not in first
    assert "down us" not in first
    lines = lines_of(second)
    assert "1 20.0 19.0 21.0 40.0 MB 2.00 3 10.0 50% - - -" in lines
    assert "1 - -" in lines


def test_what_was_measured_before_an_error_is_in_the_file(monkeypatch, tmp_path):
    def bench_experts(shapes, measure, *, device, progress):
        assert list(shapes) == ["qwen3-30b", "8x256x128x2"]
        assert (measure.tokens, measure.against, device) == ([8], ["triton", "vllm"], "cuda")
        assert (measure.stages, measure.host) == (True, False)
        assert (measure.format, measure.activations) == ("mxfp4", "fp8_token")
        assert measure.routings == ["uniform", "skewed"]
        assert measure.backend == "sm90_w4a16"
        yield DOCUMENT
        raise NumericsError("wrong")

    monkeypatch.setattr("moequant.benchmarks.experts.bench_experts", bench_experts)
    result = run(
        "--shape", "qwen3-30b,8x256x128x2", "--tokens", "8", "--against", "triton,vllm",
        "--stages", "--output", tmp_path / "run.json", "--format", "mxfp4", "--activations",
        "fp8_token", "--routing", "uniform,skewed", "--backend", "sm90_w4a16",
    )  # fmt: skip
    assert result.exit_code != 0
    assert "wrong" in result.stderr
    assert json.loads((tmp_path / "run.json").read_text()) == DOCUMENT


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_times_are_printed_where_the_file_cannot_be_written(measured, monkeypatch, tmp_path, extra):
    def no_space(path, data):
        raise MoequantError(f"{path}: cannot be written: No space left on device")

    measured(DOCUMENT)
    monkeypatch.setattr("moequant.storage.disk.replace_file", no_space)
    result = run("--shape", "gpt-oss-120b", "--output", tmp_path / "run.json", *extra)
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    if extra:
        assert json.loads(result.stdout)["layers"] == DOCUMENT["layers"]
    else:
        assert "gpt-oss-120b: " in result.stdout


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("no/x", "is not a folder; create it first"),
        (".", "is a directory"),
        ("x" * 251, "cannot be written: File name too long"),
        ("pipe", "exists and is not a file; choose another name"),
    ],
)
@pytest.mark.parametrize("command", [("bench", "experts"), ("bench", "serve"), ("tune",)])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, command, given, why
):
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(
        cli, [*command, "--shape", "qwen3-30b", "--output", str(tmp_path / given)]
    )
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_file_that_is_there_is_left_until_there_is_another(tmp_path):
    (tmp_path / "run.json").write_text("before")
    assert run("--shape", "qwen9", "--output", tmp_path / "run.json").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "before"


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "8,-1"])
def test_tokens_are_a_list_of_numbers(tokens):
    result = run("--shape", "qwen3-30b", "--tokens", tokens)
    assert result.exit_code == 2
    assert "is not a list such as 1,8,512" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        (
            "--routing",
            "uniform,hot",
            "unknown routing 'hot'; use one of: uniform, skewed, one-expert",
        ),
        ("--activations", "fp8", "unknown scheme of activations 'fp8'; use one of: format, none"),
        ("--format", "fp4", "unknown format 'fp4'; use one of: fp8_block"),
    ],
)
def test_an_unknown_name_is_wrong_usage(option, value, known):
    result = run("--shape", "qwen3-30b", option, value)
    assert result.exit_code == 2
    assert known in " ".join(result.stderr.split())


def test_a_shape_is_wanted():
    assert "Missing option '--shape'" in run().stderr


def test_an_unknown_shape_is_refused():
    result = run("--shape", "all,qwen9")
    assert result.exit_code == 2
    assert "unknown shape 'qwen9'" in result.stderr


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


def test_a_size_of_thousands_of_digits_is_no_shape():
    result = run("--shape", "9" * 5000 + "x1x1x1")
    assert result.exit_code == 2
    assert "unknown shape" in result.stderr
