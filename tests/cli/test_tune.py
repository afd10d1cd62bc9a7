from __future__ import annotations

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
        (["--shape", "qwen9"], 4, "there is no shape 'qwen9'"),
        (["--shape", "qwen3-30b", "--tokens", "0"], 2, "is not a list such as 1,8,512"),
        ([], 2, "Missing option '--shape'"),
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
        return tune.Tried(tiling={**tiling, **rest}, time_us=us)

    slow, fast = found(16, 20.04), found(8, 10.0, gather=True)

    def fake(shapes, tokens, *, device, path, progress):
        assert (list(shapes), tokens) == (["qwen3-30b", "8x256x128x2"], [1, 8])
        cell = tune.Tuned(shape="qwen3-30b", tokens=1, before=slow, after=fast, tried=[fast, slow])
        same = tune.Tuned(shape="qwen3-30b", tokens=8, before=slow, after=slow, tried=[slow])
        return tune.TuningResult(gpu="a GPU", path=str(path), cells=[cell, same])

    monkeypatch.setattr(tune, "tune", fake)
    arguments = ["tune", "--shape", "qwen3-30b,8x256x128x2", "--tokens", "1,8"]
    result = run(*arguments, "--output", tmp_path / "t.json")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "shape tokens us before us after tried before after",
        "qwen3-30b 1 20.0 10.0 2 rows 16, split13 2 rows 8, split13 2, gather",
        "qwen3-30b 8 20.0 20.0 1 rows 16, split13 2 the same",
        f"a GPU, written to {tmp_path / 't.json'}",
    ]
    document = run(*arguments, "--json").document
    assert [tried["time_us"] for tried in document["cells"][0]["tried"]] == [10.0, 20.04]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of SM90",
)
def test_a_table_is_written_that_calls_look_into(run, tmp_path, monkeypatch):
    from moequant.kernels.fp8_block import tuning

    monkeypatch.setenv("MOEQUANT_CACHE_DIR", str(tmp_path))
    shape = "16x1024x512x4"
    result = run("tune", "--shape", shape, "--tokens", "1,64", "--json")
    assert result.exit_code == 0
    tuned = result.document["cells"]
    assert [cell["tokens"] for cell in tuned] == [1, 64]
    for cell in tuned:
        assert len(cell["tried"]) > 1
        assert cell["after"]["time_us"] <= cell["before"]["time_us"]
    # A second shape goes beside the first.
    assert run("tune", "--shape", "8x1024x512x2", "--tokens", "1").exit_code == 0
    for cell in tuned:
        problem = tuning.TuningProblem(
            gpu=torch.cuda.get_device_name(),
            sms=torch.cuda.get_device_properties(0).multi_processor_count,
            experts=16, hidden=1024, intermediate=512, topk=4, tokens=cell["tokens"],
        )  # fmt: skip
        assert tuning.tiling_for(problem) == tuning.Tiling(**cell["after"]["tiling"])
