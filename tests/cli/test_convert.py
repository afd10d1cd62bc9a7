from __future__ import annotations

import json
import signal
from contextlib import nullcontext

import pytest

from moequant.cli.output import Output
from moequant.conversion import shipped_recipes
from moequant.formats import CONVERTIBLE
from moequant.progress import SilentProgress


def read_files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_format_converts_the_routed_experts_and_says_what_it_wrote(run, source, tmp_path, format):
    result = run("convert", source, tmp_path / "out", "--format", format, "--json")
    assert result.exit_code == 0
    assert result.document["state"] == "converted"
    (group,) = [g for g in result.document["groups"] if g["format"]]
    assert (group["role"], group["format"]) == ("routed_experts", format)
    # 2 layers of 4 experts with gate, up and down of [256, 256] in BF16.
    assert group["tensors"] == 24
    assert group["source_bytes"] == 24 * 256 * 256 * 2
    written = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert result.document["output_bytes"] == written
    assert result.document["next"].startswith("moequant verify ")


def test_dry_run_plans_the_bytes_that_are_then_written_and_writes_nothing(run, source, tmp_path):
    arguments = ["convert", source, tmp_path / "out", "--format", "mxfp4", "--json"]
    plan = run(*arguments, "--dry-run")
    assert plan.exit_code == 0
    assert not (tmp_path / "out").exists()
    done = run(*arguments)
    assert plan.document["state"] == "planned"
    assert plan.document["resident_bytes"] is None
    assert done.document["resident_bytes"] > done.document["peak_bytes"]
    for key in ("groups", "source_bytes", "output_bytes", "shards", "peak_bytes", "dialect"):
        assert plan.document[key] == done.document[key], key
    # Headers lie between the tensors counted by group and the bytes of the files.
    tensors = sum(group["output_bytes"] for group in plan.document["groups"])
    headers = sum(_header_bytes(p) for p in (tmp_path / "out").glob("*.safetensors"))
    assert plan.document["output_bytes"] == tensors + headers


def _header_bytes(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_options_of_the_format_are_recorded_and_gptq_says_what_it_gained(
    run, source, measure, tmp_path
):
    stats, out = measure(source, tmp_path / "stats", hessian=True), tmp_path / "out"
    command = ["convert", source, out, "--format", "mxfp4", "--statistics", stats]
    command += ["--option", "rounding=gptq", "--option", "scale_rule=floor"]
    plan = run(*command, "--dry-run")
    assert "used for 24 weights, not for 0" in plan.stdout
    done = run(*command)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("mxfp4")]
    assert [row[1:5] for row in rows] == [
        ["down", "cpu", "8", "2"],  # of the expert without tokens
        ["gate", "cpu", "8", "0"],
        ["up", "cpu", "8", "0"],
    ]
    assert all(float(row[5]) < 0.9 for row in rows)
    record = json.loads((out / "moequant.json").read_text())
    assert record["recipe"]["rules"][0]["options"] == {"rounding": "gptq", "scale_rule": "floor"}
    assert run("verify", out, "--against", source, "--statistics", stats).exit_code == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rounding"], "'rounding' is not NAME=VALUE, such as rounding=gptq"),
        (["rounding=gptq", "rounding=nearest"], "rounding is given twice: 'gptq' and 'nearest'"),
    ],
)
def test_options_that_are_no_pairs_are_refused(run, source, tmp_path, given, message):
    options = [part for text in given for part in ("--option", text)]
    result = run("convert", source, tmp_path / "out", "--format", "mxfp4", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_dry_run_with_refusals_prints_them_and_exits_4(run, make_checkpoint, tmp_path):
    ragged = make_checkpoint(intermediate=64)
    result = run("convert", ragged, tmp_path / "out", "--format", "w4a8", "--dry-run", "--json")
    assert result.exit_code == 4
    assert "down_proj" in " ".join(result.document["refusals"])
    assert result.document["error"]["type"] == "UnsupportedError"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("unfinished", [False, True])
def test_dry_run_into_what_is_occupied_shows_the_plan_and_ends_as_the_conversion(
    run, source, tmp_path, unfinished
):
    out = tmp_path / "out"
    (out / ".moequant").mkdir(parents=True)
    name = ".moequant/plan.json" if unfinished else "thesis.tex"
    (out / name).write_text('{"plan_sha256": "of another"}')
    arguments = ["convert", source, out, "--format", "nvfp4"]
    real = run(*arguments)
    planned = run(*arguments, "--dry-run")
    assert (planned.exit_code, real.exit_code) == (1, 1)
    assert planned.stderr == real.stderr
    assert ("unfinished" if unfinished else "not empty") in real.stderr
    assert "routed_experts   nvfp4" in planned.stdout
    assert "peak memory" in planned.stdout
    assert run(*arguments, "--dry-run", "--quiet").stdout == ""
    result = run(*arguments, "--dry-run", "--json")
    assert (result.exit_code, result.document["error"]["type"]) == (1, "MoequantError")
    assert result.document["error"]["message"] in result.document["refusals"]
    assert result.document["groups"]


def test_warnings_go_to_stderr_and_into_the_document(run, source, tmp_path):
    result = run("convert", source, tmp_path / "out", "--format", "nvfp4", "--json", "--quiet")
    assert result.document["warnings"]
    for warning in result.document["warnings"]:
        assert f"Warning: {warning}" in result.stderr


def test_an_output_that_is_the_source_is_refused_before_any_warning(run, source):
    result = run("convert", source, source, "--format", "nvfp4")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {source}: is the source itself")


def test_the_document_says_what_quantized_and_a_slower_one_is_a_warning(
    run, source, tmp_path, monkeypatch
):
    fast = run("convert", source, tmp_path / "fast", "--format", "w4a8", "--json").document
    assert fast["quantizer"]["name"] == "native"
    assert fast["quantizer"]["reason"] is None
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    slow = run("convert", source, tmp_path / "slow", "--format", "w4a8", "--json")
    assert slow.document["quantizer"]["name"] == "torch"
    (share,) = slow.document["quantizers"]
    assert (share["name"], share["reason"]) == ("torch", "MOEQUANT_QUANTIZER=torch")
    assert "Warning: 1 of 1 shard quantized by torch, which writes the same bytes" in slow.stderr
    assert "MOEQUANT_QUANTIZER=torch" in slow.document["warnings"][-1]
    (one,), (other,) = (list((tmp_path / n).glob("*.safetensors")) for n in ("fast", "slow"))
    assert one.read_bytes() == other.read_bytes()
    again = run("convert", source, tmp_path / "fast", "--format", "w4a8", "--json").document
    assert again["quantizer"] is None


def test_the_plan_and_the_result_say_which_engines_load_it(run, source, tmp_path):
    arguments = ("convert", source, tmp_path / "out", "--format", "nvfp4")
    planned = run(*arguments, "--dry-run").stdout
    assert "transformers 5.24   no, see the warning   a test" in planned
    assert "vLLM 0.33           yes                   its sources" in planned
    done = run(*arguments).stdout.splitlines()
    line = "Engines that load it: transformers 5.24 no, vLLM 0.33 yes, SGLang 0.5.23 yes."
    assert line in done
    document = run(*arguments, "--json", "--dry-run").document
    (transformers, _, _) = document["engines"]
    assert (transformers["loads"], transformers["known"]) == (False, "tested")
    assert transformers["why"] == document["warnings"]


def test_finished_output_is_left_as_it_is(run, source, tmp_path):
    arguments = ["convert", source, tmp_path / "out", "--format", "nvfp4", "--json"]
    assert run(*arguments).exit_code == 0
    before = read_files(tmp_path / "out")
    again = run(*arguments)
    assert again.exit_code == 0
    assert again.document["state"] == "already converted"
    assert read_files(tmp_path / "out") == before


def test_other_content_of_the_output_is_replaced_with_overwrite_only(run, source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    arguments = ["convert", source, tmp_path / "out", "--format", "fp8_block", "--json"]
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert refused.document["error"]["exit_code"] == 1
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert run(*arguments, "--overwrite").exit_code == 0


def test_recipe_dialect_workers_and_shard_size_reach_the_library(run, source, tmp_path):
    (tmp_path / "late.toml").write_text(
        '[[rules]]\nroles = ["routed_experts"]\nlayers = "1:"\nformat = "fp8_block"\n'
    )
    result = run(
        *("convert", source, tmp_path / "out", "--recipe", tmp_path / "late.toml", "--json"),
        *("--dialect", "compressed-tensors", "--workers", 1, "--max-shard-size", "1MB"),
    )
    assert result.exit_code == 0
    assert result.document["dialect"] == "compressed-tensors"
    assert result.document["workers"] == 1
    assert result.document["shards"] > 1
    # One of two layers: half the experts, and the other half is kept.
    experts = [g for g in result.document["groups"] if g["role"] == "routed_experts"]
    assert {g["format"]: g["tensors"] for g in experts} == {None: 12, "fp8_block": 12}


WANTS = {
    "deepseek-v3-fp8": "the recipe is for deepseek, but this checkpoint is",
    "deepseek-v3-nvfp4-experts": "the recipe is for deepseek, but this checkpoint is",
    "fp8-tensor-experts": "needs statistics",
}


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_shipped_recipe_converts_or_says_what_it_wants(run, source, tmp_path, recipe):
    result = run("convert", source, tmp_path / "out", "--recipe", recipe, "--json")
    if wanted := WANTS.get(recipe):
        assert result.exit_code == 6
        assert wanted in json.loads(result.stdout)["error"]["message"]
    else:
        assert result.exit_code == 0


def test_revision_of_a_directory_is_refused(run, source, tmp_path):
    result = run("convert", source, tmp_path, "--format", "w4a8", "--revision", "main", "--json")
    assert result.exit_code == 2


def test_quiet_prints_nothing_on_stdout(run, source, tmp_path):
    result = run("convert", source, tmp_path / "out", "--format", "fp8_block", "--quiet")
    assert (result.exit_code, result.stdout) == (0, "")


class InterruptingProgress(SilentProgress):
    """Presses Ctrl-C once some work is done."""

    def __init__(self, number):
        self.number = number
        self.calls = 0

    def advance(self, done_bytes, current):
        self.calls += 1
        if self.calls == 10:
            signal.raise_signal(self.number)


@pytest.fixture
def default_signals():
    """SIGTERM as the command sets it, and SIGINT also where a shell started pytest behind &."""
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_exits_130_and_the_command_it_names_continues(
    run, source, tmp_path, monkeypatch, number
):
    arguments = ["convert", source, tmp_path / "out", "--format", "nvfp4", "--json"]
    arguments += ["--max-shard-size", "500KB", "--workers", "1"]
    with monkeypatch.context() as patch:
        interrupting = nullcontext(InterruptingProgress(number))
        patch.setattr(Output, "progress", lambda self: interrupting)
        stopped = run(*arguments)
    assert stopped.exit_code == 130
    assert stopped.document["error"]["type"] == "Interrupted"
    assert " ".join(map(str, ["moequant", *arguments])) in stopped.document["error"]["message"]
    assert not (tmp_path / "out" / "config.json").exists()

    finished = run(*arguments)
    assert finished.exit_code == 0
    assert finished.document["resumed_shards"] > 0
    assert (
        run(*[tmp_path / "fresh" if a == tmp_path / "out" else a for a in arguments]).exit_code == 0
    )
    assert read_files(tmp_path / "out") == read_files(tmp_path / "fresh")


def test_an_engine_that_loads_the_format_in_no_dialect_is_exit_4(run, source, tmp_path):
    asked = ("convert", source, tmp_path / "out", "--format", "nvfp4", "--for")
    result = run(*asked, "transformers", "--json")
    assert result.exit_code == 4
    assert "is not known to load nvfp4" in result.document["error"]["message"]
    assert run(*asked, "vllm", "--dry-run").exit_code == 0
    assert run(*asked, "moequant").exit_code == 2
