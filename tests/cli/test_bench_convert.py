from __future__ import annotations

import pytest

from moequant.formats import CONVERTIBLE


@pytest.fixture
def measured(monkeypatch):
    """What the library was asked to measure; it measures nothing."""
    asked = {}

    def bench(formats, **settings):
        asked.update(formats=formats, **settings)
        run = {
            "tool": "moequant", "how": "native quantizer", "workers": 1, "cpu_seconds": 0.75,
            "seconds": 0.9, "peak_rss_bytes": 371_000_000, "import_cpu_seconds": 1.0,
            "prepare_cpu_seconds": 0.1, "cpu_seconds_beyond_floor": 0.25,
            "gb_per_cpu_second": 1.68, "gb_per_second": 1.4, "seconds_over_floor": 3.0,
            "weights_per_cpu_second": 0.84e9,
        }  # fmt: skip
        floor = {"cpu_seconds": 0.2, "seconds": 0.3, "sha256_cpu_seconds": 0.3}
        row = {"input_bytes": 1_260_000_000, "floor": floor, "conversions": [run]}
        return {
            "machine": {"processor": "Z80", "cores": 1},
            "source_format": settings["source_format"] or "bf16",
            "input_bytes": 1_260_000_000,
            "rounds": 3,
            "formats": [{"format": format, **row} for format in formats],
        }

    monkeypatch.setattr("moequant.benchmarks.conversion.bench_conversion", bench)
    return asked


def test_every_format_is_timed_unless_one_is_named(run, measured):
    assert run("bench", "convert").exit_code == 0
    assert measured["formats"] == [*CONVERTIBLE]
    assert measured["size_bytes"] == 1_260_000_000
    assert measured["against"] == []
    run("bench", "convert", "--format", "w4a8", "--size", "5", "--against", "llmcompressor")
    assert measured["formats"] == ["w4a8"]
    assert measured["size_bytes"] == 5_000_000_000
    assert measured["against"] == ["llmcompressor"]


def test_people_see_the_figures(run, measured):
    shown = run("bench", "convert", "--format", "mxfp4").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "mxfp4 floor 1 0.20 6.30 0.30 1.00 4.20" in lines
    assert "mxfp4 moequant 1 0.75 0.25 1.68 0.90 3.00 1.40 371.0 MB" in lines
    assert "1.3 GB of bf16 experts, best of 3" in lines
    assert "0.84 G weights a CPU s; SHA-256 0.30, imports 1.00, compilation 0.10 CPU s" in shown


def test_from_a_quantized_source_bf16_is_timed_too(run, measured):
    assert "of mxfp4 experts" in run("bench", "convert", "--source-format", "mxfp4").stdout
    assert measured["formats"] == [*CONVERTIBLE, "bf16"]
    assert measured["source_format"] == "mxfp4"


def test_json_is_what_was_measured(run, measured):
    document = run("bench", "convert", "--format", "mxfp4", "--json").document
    assert document["machine"] == {"processor": "Z80", "cores": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--size", "0"),
        ("--size", "inf"),
        ("--size", "nan"),
        ("--rounds", "0"),
        ("--format", "abacus"),
        ("--source-format", "abacus"),
        ("--source-format", "bf16"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(run, measured, arguments):
    assert run("bench", "convert", *arguments).exit_code == 2
    assert not measured
