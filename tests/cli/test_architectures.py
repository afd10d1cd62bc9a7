"""moequant formats --architectures, and the table of docs/architectures.md, which it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from moequant.formats import CONVERTIBLE as FORMATS
from moequant.models import architectures

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- moequant formats --architectures --markdown -->", "<!-- end -->"


@pytest.fixture(scope="module")
def rows(run_once):
    return run_once("formats", "--architectures", "--json").document["architectures"]


@pytest.fixture(scope="module")
def run_once():
    import json

    from click.testing import CliRunner

    from moequant.cli import cli

    def run_once(*args):
        result = CliRunner().invoke(cli, args)
        result.document = json.loads(result.stdout)
        return result

    return run_once


def test_every_model_type_is_in_one_row(rows):
    listed = [t for row in rows for t in row["model_types"]]
    assert sorted(listed) == sorted(t for a in architectures() for t in a.model_types)


def test_every_row_has_a_dialect_for_every_format(rows):
    for row in rows:
        assert list(row["dialects"]) == list(FORMATS)
    dialects = {row["name"]: row["dialects"] for row in rows}
    assert dialects["qwen3_moe"]["fp8_block"] == "fp8"
    assert dialects["gpt_oss"] == {
        **dict.fromkeys(FORMATS, "moequant"), "mxfp4": "gpt-oss",
    }  # fmt: skip
    assert set(dialects["dbrx"].values()) == {"moequant"}


def test_how_experts_lie_is_said(rows):
    layouts = {row["name"]: row["layout"] for row in rows}
    assert layouts["qwen3_moe"] == "separate"
    assert layouts["nemotron_h"] == "separate, no gate"
    assert layouts["gpt_oss"] == "stacked, transposed, gate and up interleaved, biases"
    assert layouts["dbrx"] == "stacked, flat, gate and up separate, down transposed"


def test_what_was_not_tested_as_a_class_saves_it_says_why(rows):
    for row in rows:
        assert (row["tested"] == "class") == (not row["notes"])
        assert row["notes"].keys() in (set(), set(row["model_types"]))
        assert row["not_loaded"].keys() in (set(), set(row["model_types"]))
        assert row["transformers_loads"] == (not row["not_loaded"])
    tested = {t: row["tested"] for row in rows for t in row["model_types"]}
    assert (tested["deepseek_v3"], tested["kimi_k2"]) == ("class", "by hand")
    assert tested["step3p5"] == "by hand"


def test_people_see_every_name(run):
    shown = run("formats", "--architectures").stdout
    assert all(t in shown for a in architectures() for t in a.model_types)


def test_the_page_has_what_the_command_prints(run):
    """Print it again: moequant formats --architectures --markdown."""
    printed = run("formats", "--architectures", "--markdown").stdout
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.split(BEGIN)[1].split(END)[0].strip() == printed.strip()


def test_markdown_is_of_architectures_alone(run):
    result = run("formats", "--markdown")
    assert result.exit_code == 2
    assert "--markdown needs --architectures" in result.stderr
