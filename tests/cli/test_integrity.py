from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(converted, tmp_path):
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def test_integrity_needs_no_source(run, converted):
    result = run("verify", converted, "--integrity")
    assert result.exit_code == 0
    assert "unchanged since it was written; 5 files" in result.stdout
    document = run("verify", converted, "--integrity", "--json").document
    assert (document["ok"], document["files"], document["problems"]) == (True, 5, [])


def test_damage_exits_5_with_the_reason(run, copy):
    shard = next(copy.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = run("verify", copy, "--integrity", "--json")
    assert result.exit_code == 5
    assert result.document["problem_count"] == 1
    assert result.document["error"]["exit_code"] == 5
    assert f"{shard.name}: SHA-256 is" in result.stderr
    assert "1 problem against its moequant.json" in result.stderr
    shown = run("verify", copy, "--integrity").stderr.splitlines()
    assert shown[-1] == "To fix it: convert again with --overwrite, or copy the files again"


def test_a_record_without_tables_is_no_reason_to_remove_files(run, copy):
    (copy / "moequant.json").write_text("{}")
    result = run("verify", copy, "--integrity")
    assert result.exit_code == 5
    keys = ("shards", "files", "source.sidecars")
    assert result.stderr.splitlines()[-4:] == [
        *(f"  moequant.json.{key}: not a table of digests by file" for key in keys),
        "To fix it: copy moequant.json again, verify with --against SOURCE, or convert again with "
        "--overwrite",
    ]


def test_without_a_record_exits_3(run, source):
    result = run("verify", source, "--integrity")
    assert result.exit_code == 3
    assert "--against SOURCE" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--integrity", "--against", "SOURCE"],
        ["--integrity", "--layers", "1"],
        ["--integrity", "--revision", "main"],
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(run, converted, options):
    assert run("verify", converted, *options).exit_code == 2


def test_digests_of_the_source_are_an_option(run, source, tmp_path):
    out = tmp_path / "out"
    assert run("convert", source, out, "--format", "mxfp4", "--hash-source").exit_code == 0
    record = json.loads((out / "moequant.json").read_text())
    assert record["source"]["content_sha256"].keys() == record["source"]["files"].keys()
