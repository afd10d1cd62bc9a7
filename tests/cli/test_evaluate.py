"""moequant evaluate: what it says before and after, and how it fails."""

from __future__ import annotations

import json
import shutil
from inspect import signature

import pytest

from moequant.cli import cli
from moequant.errors import MoequantError
from moequant.evaluation import evaluate


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    samples = [[(7 * n + i * i) % 90 for i in range(20)] for n in range(6)]
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in samples))
    return path


@pytest.fixture
def arguments(source, data):
    return ("evaluate", source, "--data", data, "--windows", 6, "--tokens", 16)


def test_it_says_what_it_will_do_and_what_it_found(run, arguments, source, converted, tmp_path):
    plot = tmp_path / "plot.svg"
    result = run(*arguments, converted, source, "--noise-floor", "--plot", plot)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split(maxsplit=1) == [
        "data", "6 windows of 16 tokens, from 1 section; chat template not applied",
    ]  # fmt: skip
    assert lines[1] == "computed     float32 on cpu"
    assert lines[2] == (
        "tests        dequantized weights; activations are not quantized (--as runtime)"
    )
    assert lines[4] == "noise floor  measured in one more pass"
    assert lines[5].startswith("peak memory  ")
    rows = {line.split("   ")[0]: line.split() for line in lines[8:13]}
    assert rows[str(source)][-3:] == ["100.00%", "0.000", "0"]
    assert float(rows[str(converted)][3]) > float(rows["noise floor"][4]) > 0
    assert lines[-1].startswith("KL(reference || test) in nats over the whole vocabulary")
    assert plot.read_text().startswith("<svg ")


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_plot_that_cannot_be_written_does_not_take_the_figures_away(
    run, arguments, converted, tmp_path, monkeypatch, extra
):
    def no_space(path, data):
        raise MoequantError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr("moequant.storage.disk.replace_file", no_space)
    result = run(*arguments, converted, "--plot", tmp_path / "plot.svg", *extra)
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    if extra:
        document = json.loads(result.stdout)
        assert document["error"]["exit_code"] == 1
        assert document["tests"][0]["kl_mean"] > 0
    else:
        assert "KL(reference || test)" in result.stdout


def test_without_a_noise_floor_it_says_how_to_get_one(run, arguments, converted):
    lines = run(*arguments, converted).stdout.splitlines()
    assert lines[4] == ("noise floor  not measured (--noise-floor, one more pass of the reference)")


def test_tests_are_compared_with_the_first_one(run, arguments, converted, tmp_path):
    tests = (converted, shutil.copytree(converted, tmp_path / "copy"))
    result = run(*arguments, *tests)
    names = tuple(map(str, tests))
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(names)]
    assert [row[-2:] for row in rows] == [["-", "-"], ["1.000", "0"]]


def test_json_has_every_figure(run, arguments, converted, tmp_path):
    keep = tmp_path / "kept"
    options = ("--as", "runtime", "--keep", keep, "--json")
    document = run(*arguments, converted, *options).document
    (test,) = document["tests"]
    assert (test["name"], test["as"], test["backends"]) == (
        str(converted), "runtime", ["torch_reference"],
    )  # fmt: skip
    assert len(test["kl_by_window"]) == 6
    assert test["kl_over_first_test"] is None
    assert test["positions"] == 96
    assert 0 < test["kl_median"] < test["kl_99"] < test["kl_999"] <= test["kl_max"]
    assert document["noise_floor"] is None
    assert document["reference_predictions"] == "written"
    assert document["peak_bytes"] >= max(document["memory"].values())
    again = run(*arguments, converted, *options).document
    assert again["reference_predictions"] == "read"
    assert again["tests"] == document["tests"]


def test_a_dry_run_says_what_it_would_do(run, arguments, converted, tmp_path):
    result = run(*arguments, converted, "--dry-run", "--keep", tmp_path / "kept")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 7
    assert not (tmp_path / "kept").exists()


def test_defaults_are_those_of_the_library():
    defaults = {parameter.name: parameter.default for parameter in cli.commands["evaluate"].params}
    library = {name: p.default for name, p in signature(evaluate).parameters.items()}
    for name in ("windows", "batch_tokens", "device", "run_as", "activations"):
        assert defaults[name] == library[name]
    assert defaults["tokens"] == library["window_tokens"]


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        ((), 2, "give a TEST to compare, --noise-floor, or --keep"),
        (("--noise-floor", "--backend", "triton"), 2, "are of --as runtime"),
        (("--noise-floor", "--keep", ""), 2, "it is empty; name a file"),
        (("--noise-floor", "--plot", ""), 2, "it is empty; name a file"),
        (("--noise-floor", "--plot", "m/config.json"), 2, "such as m/config.svg"),
        (("--noise-floor", "--windows", "99"), 6, "section 0 has 6 windows of 16 tokens, but 99"),
    ],
)
def test_failures_have_their_exit_code(run, arguments, extra, code, message):
    result = run(*arguments, *extra)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
