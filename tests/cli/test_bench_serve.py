from __future__ import annotations

import json

import pytest
import torch

from moequant.benchmarks import serving
from moequant.errors import MoequantError

STEP = {"batch": 1, "ms_per_step": 1.25, "tokens_per_s": 800.0, "share_of_floor": 0.4}
DOCUMENT = {
    "measured": "2026-01-01",
    "machine": {"gpu": "a GPU", "torch": "2"},
    "read_tb_per_s": 4.4,
    "batches": [1],
    "prefill_tokens": 8192,
    "activations": "format",
    "checkpoints": [
        {
            "name": "a-model",
            "floor_ms": {"1": 0.5},
            "engines": [
                {
                    "engine": "moequant",
                    "version": "0.1.0",
                    "experts": "sm90_fp8_block",
                    "start_s": 9.0,
                    "decode": [STEP],
                    "prefill": {"ms": 40.25, "tokens_per_s": 2e5},
                }
            ],
        }
    ],
}
INTERRUPTED = {"engine": "transformers"}
FAILED = {"engine": "vllm", "error": "vLLM is not installed", "log": "..."}


@pytest.fixture
def measured(monkeypatch):
    """measured(*engines): let `bench_serving` find these, too; returns what it is asked for."""
    asked = {}

    def measured(*engines):
        def bench(models, source, measure, *, folder, progress, keep):
            asked.update(models=models, source=source, measure=measure)
            (row,) = DOCUMENT["checkpoints"]
            timed = []
            document = {**DOCUMENT, "checkpoints": [{**row, "engines": timed}]}
            for engine in (*row["engines"], *engines):
                if engine is INTERRUPTED:
                    raise KeyboardInterrupt
                timed.append(engine)
                if keep is not None:
                    keep(document)
            return document

        monkeypatch.setattr(serving, "bench_serving", bench)
        return asked

    return measured


@pytest.mark.parametrize("file", [("--plot", "plot.svg"), ("--output", "serve.json")])
@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_file_that_cannot_be_written_does_not_take_the_times_away(
    run, measured, tmp_path, monkeypatch, extra, file
):
    def no_space(path, data):
        raise MoequantError(f"{path}: cannot be written: No space left on device")

    measured()
    monkeypatch.setattr("moequant.storage.disk.replace_file", no_space)
    option, name = file
    result = run("bench", "serve", "a-model", option, tmp_path / name, *extra)
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    if extra:
        assert json.loads(result.stdout)["checkpoints"]
    else:
        assert "a-model: ms a decoding step" in result.stdout


def test_times_stand_beside_the_floor(run, measured, tmp_path):
    asked = measured()
    plot = tmp_path / "plot.svg"
    result = run("bench", "serve", "a-model", "--engine", "moequant", "--batch", 1, "--plot", plot)
    assert result.exit_code == 0, result.output
    head, peak, _, title, columns, floor, ours = result.stdout.splitlines()
    assert head == "gpu a GPU, torch 2"
    assert "reads 4.40 TB/s" in peak
    assert title.startswith("a-model: ms a decoding step")
    assert columns.split() == [
        "engine", "version", "experts", "1", "share", "prefill", "8192,", "ms"
    ]  # fmt: skip
    assert floor.split() == ["floor", "0.500"]
    assert ours.split() == ["moequant", "0.1.0", "sm90_fp8_block", "1.250", "40%", "40.2"]
    assert plot.read_text().startswith("<svg")
    assert asked["source"] is None
    assert list(map(str, asked["models"])) == ["a-model"]
    assert asked["measure"].engines == ["moequant"]


def test_busy_times_of_profiled_engines_stand_below_the_others(run, measured):
    measured()
    assert "busy" not in run("bench", "serve", "a-model").stdout
    kernels = [{"name": "gemm", "ms": 0.75, "launches": 24.0}]
    profile = {
        part: {"busy_ms": ms, "kernels": kernels} for part, ms in (("1", 1), ("prefill", 38))
    }
    measured({**DOCUMENT["checkpoints"][0]["engines"][0], "engine": "vllm", "profile": profile})
    result = run("bench", "serve", "a-model", "--profile")
    assert result.exit_code == 0
    title, columns, *rows = result.stdout.partition("a-model: ms of these")[2].splitlines()
    assert title == " in which the GPU is busy"
    assert columns.split() == ["engine", "1", "prefill"]
    assert [row.split() for row in rows] == [["vllm", "1.000", "38.000"]]


def test_an_engine_that_failed_is_named_and_the_exit_code_is_1(run, measured):
    measured(FAILED)
    result = run("bench", "serve", "a-model")
    assert result.exit_code == 1
    assert "vllm was not timed: vLLM is not installed" in result.stdout
    assert "moequant " in result.stdout
    assert "Error: not timed: vllm with a-model" in result.stderr
    document = run("bench", "serve", "a-model", "--json").document
    assert document["error"]["message"] == "not timed: vllm with a-model"
    assert document["checkpoints"][0]["engines"][1] == FAILED


def test_what_was_timed_is_kept_when_the_command_is_interrupted(run, measured, tmp_path):
    measured(FAILED, INTERRUPTED)
    kept = tmp_path / "serve.json"
    result = run("bench", "serve", "a-model", "--output", kept)
    assert result.exit_code not in (0, 1, 2)
    document = json.loads(kept.read_text())
    (row,) = document.pop("checkpoints")
    assert [engine["engine"] for engine in row["engines"]] == ["moequant", "vllm"]
    assert document == {name: DOCUMENT[name] for name in DOCUMENT if name != "checkpoints"}


def test_the_file_holds_what_json_prints(run, measured, tmp_path):
    measured()
    kept = tmp_path / "serve.json"
    printed = run("bench", "serve", "a-model", "--json", "--output", kept).document
    assert json.loads(kept.read_text()) == printed


def test_options_say_what_to_measure(run, measured):
    asked = measured()
    options = (
        "--shape", "deepseek-v3", "--layers", 2, "--vocabulary", 4096, "--format", "mxfp4,bf16",
        "--activations", "fp8_token", "--batch", "1,8", "--prefill", 64, "--steps", 9, "--rounds",
        1, "--timeout", 5, "--attention-backend", "TRITON_MLA", "--tensor-parallel", 2,
        "--expert-parallel", "--profile",
    )  # fmt: skip
    assert run("bench", "serve", *options).exit_code == 0
    source, measure = asked["source"], asked["measure"]
    assert (source.shape, source.layers, source.vocabulary) == ("deepseek-v3", 2, 4096)
    assert source.formats == ["mxfp4", "bf16"]
    assert measure == serving.ServingMeasure(
        engines=["vllm", "vllm+moequant", "transformers", "moequant"], batches=[1, 8],
        prefill_tokens=64, steps=9, rounds=1, device="cuda", activations="fp8_token",
        attention_backend="TRITON_MLA", tensor_parallel=2, expert_parallel=True, profile=True,
        timeout_s=5,
    )  # fmt: skip


def test_wrong_usage_exits_2(run):
    for wrong in (
        ("--shape", "qwen3-30b"),
        ("--layers", 2),
        ("a-model", "--engine", "sglang"),
        ("a-model", "--format", "int3"),
        ("a-model", "--batch", "0"),
        ("a-model", "--device", "mps"),
        ("a-model", "--plot", "no-such-folder/plot.svg"),
    ):
        assert run("bench", "serve", *wrong).exit_code == 2, wrong


def test_a_folder_in_which_none_can_be_made_is_refused_by_the_option(run):
    result = run("bench", "serve", "--shape", "qwen3-30b", "--layers", 1, "--folder", "/proc")
    assert result.exit_code == 2
    said = "Invalid value for '--folder': no folder can be made in /proc: No such file"
    assert said in result.stderr
    assert "name one on a disk with room" in result.stderr


def test_nothing_to_time_and_no_folder_are_errors(run, tmp_path):
    assert run("bench", "serve", "--device", "cpu").exit_code == 2
    if not torch.cuda.is_available():
        absent = run("bench", "serve", "--shape", "qwen3-30b", "--layers", 1)
        assert absent.exit_code == 4
        assert "Traceback" not in absent.stderr
    assert run("bench", "serve", tmp_path / "none", "--device", "cpu").exit_code == 3


@pytest.mark.parametrize("option", [("--format", "mxfp4"), ("--vocabulary", 512)])
def test_options_of_a_random_model_need_one(run, converted, option):
    done = run("bench", "serve", converted, *option)
    assert done.exit_code == 2
    assert "are of a model of random weights: give --shape and --layers" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--shape", "qwen3-30b"), "--shape qwen3-30b needs --layers: how many of its layers"),
        (("--layers", "4"), "--layers is of a model of random weights: give --shape too"),
    ],
)
def test_a_shape_and_its_number_of_layers_are_asked_for_by_name(run, given, message):
    result = run("bench", "serve", *given)
    assert result.exit_code == 2
    assert message in result.stderr
