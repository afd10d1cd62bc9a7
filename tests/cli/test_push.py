"""moequant push, as far as it needs no hub; tests/hub/test_push.py has one."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture
def copy(converted, tmp_path):
    """The converted checkpoint, not verified yet."""
    ignore = shutil.ignore_patterns(".moequant-verified.json")
    return shutil.copytree(converted, tmp_path / "copy", ignore=ignore)


def test_verify_then_push_is_the_way(run, source, copy):
    plan = ("push", copy, "me/it", "--dry-run")
    assert f"verified    no: {copy}: was not verified; run moequant verify" in run(*plan).stdout
    assert run("verify", copy, "--against", source, "--layers", "0").exit_code == 0
    result = run(*plan, "--json")
    assert result.exit_code == 0
    document = result.document
    assert (document["state"], document["verified"], document["url"]) == ("planned", True, None)
    names = [file["name"] for file in document["files"]]
    assert names[0] == "moequant.json"
    assert {"config.json", "tokenizer.json", "README.md"} <= {*names}
    assert document["bytes"] == sum(file["bytes"] for file in document["files"])
    assert document["card"].startswith("---\n")
    assert "Warning: the source was a directory, so the card names no base model" in result.stderr


def test_what_was_not_verified_is_refused_before_the_hub_is_asked(run, copy):
    result = run("push", copy, "me/it", "--json")
    assert result.exit_code == 1
    assert "was not verified; run moequant verify" in result.document["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("me/it", "--report", "nothing.html"), 2, "nothing.html"),
        (("it",), 2, "no id of a repository on the hub"),
        (("me/it", "--base-model", "it"), 2, "'it': no id of a repository on the hub"),
        (("me/it", "--revision", "a//b"), 2, "'a//b': no name of a branch; give letters"),
        (("me/it", "--picture", __file__), 2, "not a picture; give files .png"),
        ((), 2, "REPO_ID"),
    ],
)
def test_wrong_arguments_are_named(run, copy, arguments, code, message):
    result = run("push", copy, *arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_a_source_is_refused(run, source):
    result = run("push", source, "me/it", "--dry-run")
    assert result.exit_code == 3
    assert "has no moequant.json, so moequant did not convert it" in result.stderr


def test_a_quality_file_of_another_command_is_refused(run, copy, tmp_path):
    (tmp_path / "quality.json").write_text("{}")
    arguments = ("--dry-run", "--quality", tmp_path / "quality.json")
    result = run("push", copy, "me/it", *arguments)
    assert result.exit_code == 6
    assert "reference: Field required; give what moequant evaluate --json" in result.stderr
