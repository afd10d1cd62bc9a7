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
            "activations": ["none"],
            "layout": ["w4a16_panels"],
            "never_run": [],
            "bytes": 3_850_000_000,
            "load_s": 0.7,
            "plain_s": 0.35,
            "plain_threads": 4,
            "share": 0.5,
        },
        {"folder": "q/sm90", "prepared_for": "sm90", "error": "q/sm90: stale"},
    ],
}
WHOLE = {**DOCUMENT, "folders": DOCUMENT["folders"][:1]}


def test_loading_stands_beside_the_plain_read(run, monkeypatch, tmp_path):
    asked = {}

    def bench(checkpoint, **options):
        asked.update(options, checkpoint=checkpoint)
        return DOCUMENT

    monkeypatch.setattr(loading, "bench_loading", bench)
    result = run("bench", "load", tmp_path, "--rounds", 2, "--activations", "none")
    assert result.exit_code == 1, result.output
    assert result.stderr == "Error: not timed: prepared for sm90\n"
    assert (asked["checkpoint"], asked["rounds"], asked["device"]) == (str(tmp_path), 2, "cuda")
    assert asked["activations"] == "none"
    machine, head, _, columns, row, refused = result.stdout.splitlines()
    assert (machine, head) == ("gpu a GPU, torch 2", "q: 6 layers, medians of 3")
    names = [
        "experts",
        "activations",
        "layout",
        "bytes",
        "s",
        "GB/s",
        "plain",
        "s",
        "GB/s",
        "threads",
        "share",
    ]
    assert columns.split() == names
    wanted = [
        "as",
        "converted",
        "none",
        "w4a16_panels",
        "3.9",
        "GB",
        "0.700",
        "5.50",
        "0.350",
        "11.00",
        "4",
        "50%",
    ]
    assert row.split() == wanted
    assert refused == "prepared for sm90 was not timed: q/sm90: stale"


def test_with_all_folders_timed_the_exit_code_is_0_and_what_no_gpu_has_run_is_marked(
    run, monkeypatch, tmp_path
):
    of_target = {"prepared_for": "sm100", "layout": ["stacked_tiles"], "never_run": ["cutlass_fp4"]}
    document = {**WHOLE, "folders": [*WHOLE["folders"], {**WHOLE["folders"][0], **of_target}]}
    monkeypatch.setattr(loading, "bench_loading", lambda checkpoint, **options: document)
    result = run("bench", "load", tmp_path)
    assert result.exit_code == 0
    assert "prepared for sm100 (compiled, never run)" in result.stdout
    assert run("bench", "load", tmp_path, "--json").document["folders"] == document["folders"]


def test_as_json_a_failure_has_the_document_too(run, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "bench_loading", lambda checkpoint, **options: DOCUMENT)
    result = run("bench", "load", tmp_path, "--json")
    assert result.exit_code == 1
    assert result.document["folders"] == DOCUMENT["folders"]


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--device", "nothing"]])
def test_what_cannot_be_loaded_is_refused(run, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("bench", "load", *arguments)
    assert result.exit_code not in (0, 1)
    assert "Traceback" not in result.output


def test_the_folder_is_looked_at_before_the_device(run, tmp_path):
    result = run("bench", "load", tmp_path / "none", "--device", "no-such-device")
    assert result.exit_code == 3
    assert f"{tmp_path / 'none'}: no such directory" in result.stderr
