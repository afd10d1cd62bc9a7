from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from moequant.benchmarks import conversion
from moequant.benchmarks.conversion import bench_conversion
from moequant.benchmarks.random_checkpoint import EXPERT_BYTES, write_bench_checkpoint
from moequant.conversion import convert
from moequant.errors import ArgumentError, MoequantError, UnsupportedError
from moequant.storage.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Two experts, one round."""
    folder = tmp_path_factory.mktemp("bench")
    found = bench_conversion(
        ["mxfp4"], size_bytes=2 * EXPERT_BYTES, workers=2, rounds=1, folder=folder
    )
    assert list(folder.iterdir()) == []
    return found


def test_every_figure_is_there_and_positive(document):
    assert json.loads(json.dumps(document)) == document
    assert document["input_bytes"] == 2 * EXPERT_BYTES
    (row,) = document["formats"]
    assert row["floor"]["cpu_seconds"] > 0
    assert [(run["tool"], run["workers"]) for run in row["conversions"]] == [
        ("moequant", 1),
        ("moequant", 2),
    ]
    for run in row["conversions"]:
        assert run["how"] == "native quantizer"
        for figure in ("cpu_seconds", "seconds", "peak_rss_bytes", "gb_per_cpu_second"):
            assert run[figure] > 0


@pytest.fixture(scope="module")
def from_fp8(tmp_path_factory):
    """The same experts in FP8 blocks, one round to bf16 and to nvfp4."""
    folder = tmp_path_factory.mktemp("bench")
    found = bench_conversion(
        ["bf16", "nvfp4"],
        size_bytes=2 * EXPERT_BYTES,
        workers=1,
        rounds=1,
        source_format="fp8_block",
        folder=folder,
    )
    assert list(folder.iterdir()) == []
    return found


def test_a_quantized_source_is_converted_and_counted_in_weights(from_fp8):
    weights = EXPERT_BYTES  # two experts, two bytes a weight
    assert from_fp8["source_format"] == "fp8_block"
    assert from_fp8["weights"] == weights
    assert from_fp8["input_bytes"] == weights + 4 * weights // 128**2
    restored, quantized = from_fp8["formats"]
    assert restored["output_bytes"] > 2 * weights > weights > quantized["output_bytes"]
    for row in (restored, quantized):
        (run,) = row["conversions"]
        assert run["how"] == "native quantizer"
        assert run["weights_per_cpu_second"] == weights / run["cpu_seconds"]


def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    settings = {"size_bytes": 1, "workers": 1, "rounds": 1, "folder": tmp_path}
    with pytest.raises(ArgumentError, match="bf16 dequantizes"):
        bench_conversion(["bf16"], **settings)
    monkeypatch.setattr(conversion, "find_spec", lambda name: name)
    with pytest.raises(ArgumentError, match="llmcompressor is timed only on BF16"):
        bench_conversion(["nvfp4"], against=["llmcompressor"], source_format="mxfp4", **settings)
    assert not list(tmp_path.iterdir())


def test_ratios_are_those_of_the_figures(document):
    (row,) = document["formats"]
    floor = row["floor"]
    for run in row["conversions"]:
        beyond = run["cpu_seconds"] - floor["cpu_seconds"] - floor["sha256_cpu_seconds"]
        assert run["cpu_seconds_beyond_floor"] == pytest.approx(beyond)
        assert run["seconds_over_floor"] == pytest.approx(run["seconds"] / floor["seconds"])
        assert run["gb_per_second"] == pytest.approx(row["input_bytes"] / 1e9 / run["seconds"])


@pytest.mark.parametrize("experts", [1, 3, 130])
def test_the_checkpoint_has_the_size_asked_for_and_converts(tmp_path, monkeypatch, experts):
    if experts > 3:
        monkeypatch.setattr("moequant.benchmarks.random_checkpoint.BENCH_HIDDEN", 128)
        monkeypatch.setattr("moequant.benchmarks.random_checkpoint.BENCH_INTERMEDIATE", 128)
    size_bytes = write_bench_checkpoint(tmp_path / "source", experts * EXPERT_BYTES)
    assert size_bytes == experts * EXPERT_BYTES
    source = Checkpoint.open(tmp_path / "source")
    layers = source.config["num_hidden_layers"]
    assert layers * source.config["num_experts"] == experts
    plan = convert(tmp_path / "source", tmp_path / "out", format="fp8_block", dry_run=True).plan
    assert not plan.refusals
    assert len(plan.units) == 2 * experts


def test_a_tool_that_is_not_there_is_named_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="unknown tool 'abacus'; use one of: llmcompressor"):
        bench_conversion(["mxfp4"], size_bytes=1, workers=1, rounds=1, against=["abacus"])
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install llmcompressor"):
        bench_conversion(["mxfp4"], size_bytes=1, workers=1, rounds=1, against=["llmcompressor"])


def test_a_conversion_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "abacus")
    with pytest.raises(MoequantError, match=r"(?s)did not convert to mxfp4.*abacus"):
        bench_conversion(["mxfp4"], size_bytes=1, workers=1, rounds=1, folder=tmp_path)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path, monkeypatch):
    free = SimpleNamespace(free=4 * 10**9)
    monkeypatch.setattr("moequant.benchmarks.conversion.shutil.disk_usage", lambda path: free)
    with pytest.raises(MoequantError, match=r"4\.00 GB free, but 6\.00 GB are needed .* --folder"):
        bench_conversion(["mxfp4"], size_bytes=3 * 10**9, workers=2, rounds=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())
