from __future__ import annotations

from dataclasses import asdict

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so(run):
    result = run("tune", "--shape", "qwen3-30b")
    assert result.exit_code == 4
    assert "device 'cuda' cannot be used" in result.stderr
    assert "run this where there is a CUDA device" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--shape", "qwen9"], 2, "unknown shape 'qwen9'"),
        (["--shape", "qwen3-30b", "--tokens", "0"], 2, "is not a list such as 1,8,512"),
        ([], 2, "Missing option '--shape'"),
        (
            ["--shape", "qwen3-30b", "--format", "mxfp4,fp4"],
            2,
            "unknown format 'fp4'; use one of: fp8_block",
        ),
        (
            ["--shape", "qwen3-30b", "--activations", "fp8"],
            2,
            "unknown scheme of activations 'fp8'; use one of: format, none",
        ),
    ],
)
def test_what_it_cannot_tune_is_refused(run, arguments, code, message):
    result = run("tune", *arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_what_was_found_is_shown(run, monkeypatch, tmp_path):
    from moequant.benchmarks import tune

    def found(rows, us, **rest):
        tiling = {"rows": rows, "split13": 2, "split2": 1, "pair": False, "gather": False}
        return {"tiling": {**tiling, **rest}, "time_us": us}

    slow, fast = found(16, 20.04), found(8, 10.0, gather=True)

    def fake(shapes, tokens, *, formats, activations, backend, device, path, progress):
        assert (list(shapes), tokens) == (["qwen3-30b", "8x256x128x2"], [1, 8])
        assert (formats, activations, backend) == (["fp8_block", "mxfp4"], "fp8_token", "triton")
        shown = {"shape": "qwen3-30b", "format": "fp8_block", "before": slow}
        return {
            "gpu": "a GPU",
            "tables": {"fp8_block": str(path)},
            "refusals": {"8x256x128x2, w4a8": "odd"},
            "cells": [
                {**shown, "tokens": 1, "after": fast, "tried": [fast, slow]},
                {**shown, "tokens": 8, "after": slow, "tried": [slow]},
            ],
        }

    monkeypatch.setattr(tune, "tune", fake)
    arguments = ["tune", "--shape", "qwen3-30b,8x256x128x2", "--tokens", "1,8"]
    arguments += ["--format", "fp8_block,mxfp4", "--activations", "fp8_token"]
    arguments += ["--backend", "triton"]
    result = run(*arguments, "--output", tmp_path / "t.json")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "shape format tokens us before us after tried before after",
        "qwen3-30b fp8_block 1 20.0 10.0 2 rows 16, split13 2 rows 8, split13 2, gather",
        "qwen3-30b fp8_block 8 20.0 20.0 1 rows 16, split13 2 the same",
        f"a GPU, written to {tmp_path / 't.json'}",
        "not tuned: 8x256x128x2, w4a8: odd",
    ]
    document = run(*arguments, "--json").document
    assert [tried["time_us"] for tried in document["cells"][0]["tried"]] == [10.0, 20.04]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of SM90",
)
@pytest.mark.parametrize(
    ("format", "activations", "backend"),
    [
        ("fp8_block", "format", None),
        ("w4a8", "format", None),
        ("mxfp4", "fp8_token", None),
        ("nvfp4", "format", "sm90_w4a16"),
    ],
)
def test_a_table_is_written_that_calls_look_into(
    run, tmp_path, monkeypatch, format, activations, backend
):
    from moequant.benchmarks.shapes import parse_shape
    from moequant.benchmarks.tune import TunedLayer

    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path))
    shape = "16x1024x512x4"
    options = ["--format", format, "--activations", activations]
    options += [] if backend is None else ["--backend", backend]
    result = run("tune", "--shape", shape, "--tokens", "1,64", *options, "--json")
    assert result.exit_code == 0
    tuned = result.document["cells"]
    assert [cell["tokens"] for cell in tuned] == [1, 64]
    for cell in tuned:
        assert len(cell["tried"]) > 1
        # What is kept may take 3 % longer with uniform routing, if it saves more with skewed.
        assert 0.97 * cell["after"]["time_us"] <= min(row["time_us"] for row in cell["tried"])
        before, after = (cell[when] for when in ("before", "after"))
        if before["skewed_us"] is not None:  # else uniform routing alone rules it out
            assert after["time_us"] * after["skewed_us"] <= before["time_us"] * before["skewed_us"]
    # A second shape goes beside the first.
    again = ["tune", "--shape", "8x1024x512x2", "--tokens", "1", *options]
    assert run(*again).exit_code == 0
    device = torch.device("cuda", 0)
    layer = TunedLayer(parse_shape(shape), format, backend, device, activations=activations)
    tuner = layer.tuner
    for cell in tuned:
        assert asdict(tuner.tiling(cell["tokens"], 4)) == cell["after"]["tiling"]
