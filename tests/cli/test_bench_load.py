from __future__ import annotations

import pytest

from moequant.benchmarks import loading

DOCUMENT = {
    "measured": "2026-01-01",
    "machine": {"gpu": "a GPU", "torch": "2"},
    "checkpoint": "q",
    "layers": 6,
    "rounds": 3,
    "folders": [
        {
            "folder": "q",
            "prepared_for": None,
            "bytes": 3_850_000_000,
            "load_s": 0.7,
            "plain_s": 0.35,
            "plain_threads": 4,
            "share": 0.5,
        },
        {"folder": "q/sm90", "prepared_for": "sm90", "error": "q/sm90: stale"},
    ],
}


def test_loading_stands_beside_the_plain_read(run, monkeypatch, tmp_path):
    asked = {}

    def bench(checkpoint, **options):
        asked.update(options, checkpoint=checkpoint)
        return DOCUMENT

    monkeypatch.setattr(loading, "bench_loading", bench)
    result = run("bench", "load", tmp_path, "--rounds", 2, "--activations", "none")
    assert result.exit_code == 0, result.output
    assert (asked["checkpoint"], asked["rounds"], asked["device"]) == (tmp_path, 2, "cuda")
    assert asked["activations"] == "none"
    machine, head, _, columns, row, refused = result.stdout.splitlines()
    assert (machine, head) == ("gpu a GPU, torch 2", "q: 6 layers, medians of 3")
    names = ["experts", "bytes", "s", "GB/s", "plain", "s", "GB/s", "threads", "share"]
    assert columns.split() == names
    wanted = ["as", "converted", "3.9", "GB", "0.700", "5.50", "0.350", "11.00", "4", "50%"]
    assert row.split() == wanted
    assert refused == "prepared for sm90 was not timed: q/sm90: stale"


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--device", "nothing"]])
def test_what_cannot_be_loaded_is_refused(run, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("bench", "load", *arguments)
    assert result.exit_code not in (0, 1)
    assert "Traceback" not in result.output
