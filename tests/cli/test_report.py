"""moequant report: the page it writes, what it prints, and with which exit code."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def page(tmp_path):
    return tmp_path / "page.html"


def save(path, result):
    assert result.exit_code == 0, result.output
    path.write_text(json.dumps(result.document))
    return path


def test_a_clean_output_exits_0_and_the_page_says_so(run, source, converted, page):
    result = run("report", converted, "--against", source, "-o", page)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split()[-1] == "verified"
    assert lines[-1].startswith(f"{page}: ")
    assert "2 things not measured" in lines[-1]
    assert "verified: every byte is" in page.read_text()


def test_json_is_the_document_of_the_page(run, converted, page):
    result = run("report", converted, "--json", "-o", page)
    assert result.exit_code == 0
    assert result.document["outputs"][0]["verdict"] == "unchanged"
    assert result.document["page_bytes"] == page.stat().st_size


def test_the_page_is_report_html_by_default(run, converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("report", converted, "--quiet").exit_code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_fault_exits_5_names_it_and_writes_the_page(run, source, converted, tmp_path, page):
    copy = shutil.copytree(converted, tmp_path / "copy")
    (shard,) = copy.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for against in ((), ("--against", source)):
        result = run("report", converted, copy, *against, "-o", page)
        assert result.exit_code == 5
        assert "Error: 1 of 2 outputs failed a check\n  copy: " in result.stderr
        assert f"{page} lists the problems" in result.stderr
        assert "✗" in page.read_text()
        page.unlink()
    document = run("report", copy, "--json", "-o", page).document
    assert document["error"]["exit_code"] == 5
    assert document["outputs"][0]["problems"]


def test_saved_results_of_other_commands_are_taken(run, source, tmp_path, page):
    out = tmp_path / "out"
    conversion = save(
        tmp_path / "c.json", run("convert", source, out, "--format", "mxfp4", "--json")
    )
    verified = save(
        tmp_path / "v.json", run("verify", out, "--against", source, "--layers", "1", "--json")
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [*range(n, n + 20)]}) + "\n" for n in (0, 9)))
    sizes = ("--windows", "2", "--tokens", "16", "--noise-floor", "--json")
    evaluation = save(tmp_path / "e.json", run("evaluate", source, out, "--data", data, *sizes))
    saved = ("--conversion", conversion, "--verified", verified, "--evaluation", evaluation)
    document = run("report", out, *saved, "-o", page, "--json").document
    (output,) = document["outputs"]
    assert (output["verdict"], output["verified_earlier"]) == ("verified", True)
    assert output["conversion"]["peak_bytes"] > 1e6
    assert output["conversion"]["resident_bytes"] > output["conversion"]["peak_bytes"]
    assert output["evaluated_as"] == [0, 0]
    assert document["evaluations"][0]["noise_floor"]["kl_mean"] >= 0
    whats = [gap["what"] for gap in document["not_measured"]]
    assert whats == ["The headers of its source were not read: bytes before, by role."]
    html = page.read_text()
    for words in ("unchanged since", "KL divergence", "noise floor", "time of the conversion"):
        assert words in html
    assert "the process with Python and torch held at most" in html
    complete = run("report", out, "--against", source, *saved, "-o", page, "--json").document
    assert complete["not_measured"] == []
    assert complete["outputs"][0]["verified_earlier"]


def test_a_planned_conversion_has_no_time(run, source, converted, tmp_path, page):
    planned = run("convert", source, tmp_path / "o", "--format", "mxfp4", "--dry-run", "--json")
    file = save(tmp_path / "p.json", planned)
    result = run("report", converted, "--conversion", file, "-o", page)
    assert result.exit_code == 1
    assert "its state is 'planned'" in result.stderr


def test_results_of_another_checkpoint_are_refused(run, source, converted, tmp_path, page):
    made = run("convert", source, tmp_path / "o", "--format", "mxfp4", "--json")
    file = save(tmp_path / "c.json", made)
    result = run("report", converted, "--conversion", file, "-o", page)
    assert result.exit_code == 1
    assert f"{file}: a result of {tmp_path / 'o'}" in result.stderr
    assert not page.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument"),
        (("out", "--layers", "2"), "--layers needs --against"),
        (("out", "--revision", "main"), "--revision needs --against"),
        (("out", "-o", "no/such/folder/page.html"), "is not a folder"),
        (("out", "-o", "config.json"), "config.json does not end in .html or .htm; name"),
    ],
)
def test_wrong_usage_exits_2(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("report", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_cannot_be_read_has_the_codes_of_other_commands(run, source, tmp_path, page):
    assert run("report", tmp_path / "missing", "-o", page).exit_code == 3
    assert run("report", source, "--against", tmp_path / "missing", "-o", page).exit_code == 3
    assert not page.exists()


def test_what_is_not_converted_is_refused(run, source, page):
    result = run("report", source, "-o", page)
    assert result.exit_code == 3
    assert f"{source}/config.json: no quantization_config" in result.stderr
    assert "Convert it first: moequant convert SOURCE OUTPUT --format NAME" in result.stderr
    assert not page.exists()


def test_a_checkpoint_converted_to_bf16_is_reported(run, converted, tmp_path, page):
    plain = tmp_path / "plain"
    assert run("convert", converted, plain, "--format", "bf16").exit_code == 0
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert run("report", plain, "-o", page).exit_code == 0


def test_a_page_may_lie_in_the_folder_of_the_checkpoint(run, source, converted, tmp_path):
    copy = shutil.copytree(converted, tmp_path / "copy")
    assert run("report", copy, "-o", copy / "report.html").exit_code == 0
    assert run("verify", copy, "--integrity").exit_code == 0
    assert run("verify", copy, "--against", source, "--layers", "0").exit_code == 0
