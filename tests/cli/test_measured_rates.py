"""The rates of conversions are kept, and a plan says by them how long it will take."""

from __future__ import annotations

import pytest

from moequant.cli import measured_rates
from moequant.cli.measured_rates import duration, expected_seconds, remember_rate


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_time_is_expected_only_by_rates_of_every_part():
    assert expected_seconds({"hub nvfp4": 1}) is None
    remember_rate("hub nvfp4", 4_000_000_000, 40)
    assert expected_seconds({"hub nvfp4": 2_000_000_000}) == pytest.approx(20)
    assert expected_seconds({"hub nvfp4": 1, "disk nvfp4": 1}) is None
    assert expected_seconds({"hub nvfp4": 10**9, "disk nvfp4": 0}) == pytest.approx(10)
    remember_rate("disk nvfp4", 4_000_000_000, 4)
    sizes = {"hub nvfp4": 10**9, "disk nvfp4": 10**9}
    assert expected_seconds(sizes) == pytest.approx(11)
    remember_rate("hub nvfp4", 4_000_000_000, 20)
    assert expected_seconds(sizes) == pytest.approx(6)


def test_small_conversions_and_unusable_files_give_no_rate(cache):
    remember_rate("disk nvfp4", 999_999_999, 1)
    assert not list(cache.iterdir())
    (cache / "moequant").mkdir()
    for text in ("[", "[]", '{"disk nvfp4": -1.0}', '{"disk nvfp4": "1"}', '{"disk nvfp4": NaN}'):
        (cache / "moequant" / "rates.json").write_text(text)
        assert expected_seconds({"disk nvfp4": 1}) is None
    remember_rate("disk nvfp4", 4_000_000_000, 4)
    assert expected_seconds({"disk nvfp4": 10**9}) == pytest.approx(1)


def test_a_folder_that_cannot_be_written_is_no_error(cache):
    (cache / "moequant").write_text("a file")
    remember_rate("disk nvfp4", 4_000_000_000, 4)
    assert expected_seconds({"disk nvfp4": 1}) is None


def test_the_plan_after_a_conversion_says_the_time(run, make_checkpoint, tmp_path, monkeypatch):
    source = make_checkpoint()
    plan = ("convert", source, tmp_path / "out", "--format", "nvfp4", "--dry-run")
    assert run(*plan, "--json").document["expected_seconds"] is None
    assert "\ntime " not in run(*plan).stdout
    monkeypatch.setattr(measured_rates, "LEAST_BYTES", 0)
    done = run("convert", source, tmp_path / "done", "--format", "nvfp4", "--json").document
    expected = run(*plan, "--json").document["expected_seconds"]
    assert expected == pytest.approx(done["seconds"], abs=0.0005)  # which has milliseconds
    line = f"\ntime         about {duration(expected)}, by the rates of earlier conversions"
    assert line in run(*plan).stdout
    other = run(*plan[:-2], "mxfp4", "--dry-run", "--json").document
    assert other["expected_seconds"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01, "0.1 s"),
        (9.7, "9.7 s"),
        (40.3, "40 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5999, "100 min"),
        (6000, "1.7 h"),
    ],
)
def test_a_time_is_short(seconds, text):
    assert duration(seconds) == text
