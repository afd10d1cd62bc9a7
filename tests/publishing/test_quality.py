"""Figures of an evaluation are those of the checkpoint, or none."""

from __future__ import annotations

import json

import pytest

from moequant.errors import DataError
from moequant.publishing.quality import quality_table, read_quality


def result(name, **changed):
    return {
        "name": str(name), "dtype": "float32", "as": "weights", "backends": [],
        "perplexity_reference": 8.0, "perplexity": 8.5, "kl_mean": 0.0625, "kl_mean_se": 0.005,
        "kl_99": 0.5, "kl_max": 2.0, "same_top": 0.9375, **changed,
    }  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(*tests, floor=None, **changed):
        path = tmp_path / "quality.json"
        document = {
            "reference": "them/it",
            "tests": [*tests],
            "noise_floor": floor,
            "data": {"sha256": "0" * 64, "windows": 16, "window_tokens": 512},
            **changed,
        }
        path.write_text(json.dumps(document))
        return path

    return write


def test_the_test_of_the_same_directory_counts(write, tmp_path):
    out = tmp_path / "out"
    file = write(result(tmp_path / "other"), result(out, kl_mean=0.125), result("elsewhere/out"))
    assert read_quality(file, out).test.kl_mean == 0.125


def test_a_directory_of_this_name_on_another_machine_counts(write, tmp_path):
    file = write(result("elsewhere/other"), result("elsewhere/out", kl_mean=0.125))
    assert read_quality(file, tmp_path / "out").test.kl_mean == 0.125


@pytest.mark.parametrize("names", [(), ("other",), ("a/out", "b/out")])
def test_figures_of_other_checkpoints_are_refused(write, tmp_path, names):
    file = write(*map(result, names))
    with pytest.raises(DataError, match=r"but not .*out; give the figures of moequant evaluate"):
        read_quality(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"kl_mean": None}, r"tests\[0\]\.kl_mean"),
        ({"kl_mean": float("nan")}, r"tests\[0\]\.kl_mean"),
        ({"same_top": "many"}, r"tests\[0\]\.same_top"),
    ],
)
def test_a_wrong_figure_is_named(write, tmp_path, changed, place):
    with pytest.raises(DataError, match=rf"{place}: .*moequant evaluate --json printed"):
        read_quality(write(result("out", **changed)), tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tests": 1}'])
def test_another_document_is_refused(tmp_path, text):
    file = tmp_path / "quality.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"quality\.json"):
        read_quality(file, tmp_path / "out")


def test_the_table_has_source_model_and_noise_floor(write, tmp_path):
    floor = result("noise floor", dtype="bfloat16", kl_mean=0.001, kl_mean_se=None)
    found = read_quality(write(result("out"), floor=floor), tmp_path / "out")
    assert quality_table(found) == [
        ("source", "8.000", "0", "0", "100 %"),
        ("this model", "8.500", "0.0625 ± 0.005", "0.5", "93.75 %"),
        ("source in bfloat16", "8.500", "0.001", "0.5", "93.75 %"),
    ]
