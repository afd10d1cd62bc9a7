"""moequant calibrate: what it says before and after, and how it fails."""

from __future__ import annotations

import json
from inspect import signature

import pytest

from moequant.calibration import calibrate
from moequant.cli import cli
from moequant.statistics import Statistics


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    samples = [[(7 * n + i) % 90 for i in range(20)] for n in range(6)]
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in samples))
    return path


def test_it_says_what_it_will_do_and_what_experts_saw(run, source, data, tmp_path):
    out = tmp_path / "stats.safetensors"
    result = run("calibrate", source, "--data", data, "-o", out)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "120 tokens in 6 windows, from 6 samples; chat template not applied" in lines[1]
    assert lines[2].startswith("computed     float32 on cpu")
    assert lines[3].startswith("peak memory  ")
    assert lines[4].startswith("disk ")
    found = Statistics.load(out)
    seen = [found.tokens(found.layers[0], e) for e in range(found.record.experts)]
    row = lines[7].split()
    assert row[:2] == [str(found.layers[0]), str(min(seen))]
    assert lines[-1].endswith(f"sha256 of its header {found.digest[:16]}")
    again = run("calibrate", source, "--data", data, "-o", out)
    assert again.stdout.splitlines()[-1].startswith(f"{out}: already calibrated; sha256")


def test_json_has_the_plan_and_the_tokens_of_every_expert(run, source, data, tmp_path):
    out = tmp_path / "stats"
    result = run("calibrate", source, "--data", data, "-o", out, "--hessian", "--json")
    document, found = result.document, Statistics.load(out)
    assert document["state"] == "calibrated"
    assert document["sha256"] == found.digest
    assert document["hessian"] is found.has_hessian is True
    assert document["peak_bytes"] >= max(document["memory"].values())
    assert document["data"]["chat_template"] is False
    for layer in document["layers"]:
        seen = layer["tokens"]
        assert seen == [found.tokens(layer["layer"], e) for e in range(len(seen))]
        assert layer["unrouted"] == [e for e, tokens in enumerate(seen) if tokens == 0]
        few = [e for e, tokens in enumerate(seen) if 0 < tokens < document["prior_tokens"]]
        assert layer["mostly_pooled"] == few


def test_a_dry_run_says_what_it_would_do(run, source, data, tmp_path):
    result = run("calibrate", source, "--data", data, "-o", tmp_path / "stats", "--dry-run")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert not (tmp_path / "stats").exists()


def test_defaults_are_those_of_the_library():
    defaults = {parameter.name: parameter.default for parameter in cli.commands["calibrate"].params}
    library = {name: p.default for name, p in signature(calibrate).parameters.items()}
    for name in ("tokens", "batch_tokens", "device", "prior_tokens"):
        assert defaults[name] == library[name]
    assert defaults["window"] == library["window_tokens"]


def test_quiet_prints_nothing(run, source, data, tmp_path):
    result = run("calibrate", source, "--data", data, "-o", tmp_path / "stats", "-q")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ('{"input_ids": [1, 99999]}', 6, "line 1: 99999 is no token id of the model"),
        ('{"text": "a"}', 4, "cannot read the tokenizer"),
    ],
)
def test_data_that_cannot_be_used_has_its_exit_code(run, source, tmp_path, line, code, message):
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    result = run("calibrate", source, "--data", path, "-o", tmp_path / "stats")
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"]
