"""The card says what is known of a checkpoint, and nothing that is not."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from moequant.conversion import convert
from moequant.errors import ArgumentError, CheckpointError, MoequantError
from moequant.publishing import plan_push
from moequant.publishing.markdown import code_block, table
from moequant.reporting import make_report
from moequant.verification import verify

REPO = "me/it-nvfp4"


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint(layers=2, experts=2, vocabulary=64)


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(source, out, format="nvfp4")
    return out


@pytest.fixture(scope="module")
def report(source, converted):
    return verify(converted, against=source, layers=1)


@pytest.fixture
def copy(converted, tmp_path):
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def cells(card, first):
    """The cells of the row of a table that begins with a text."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \|.*$", card, re.M)
    return [cell.strip() for cell in row.strip("|").split("|")]


def percent(share):
    return f"{share:.3%}".replace("%", " %")


def test_figures_are_those_of_the_files_and_of_the_report(converted, report):
    card = plan_push(converted, REPO, verification=report).card
    shards = sum(path.stat().st_size for path in converted.glob("*.safetensors"))
    assert cells(card, "size") == ["size", f"{shards / 1e6:.1f} MB"]
    (summary,) = report.formats
    row = cells(card, "nvfp4")
    assert row[1:4] == [
        "12",
        f"{summary.total.sqnr_db:.2f} dB",
        percent(summary.total.relative_error),
    ]
    assert row[5] == summary.worst.name
    downs = [g.relative_error for g in report.errors if g.projection == "down"]
    assert len(downs) == 2
    ends = map(percent, (min(downs), max(downs)))
    rows = re.findall(r"^\| routed_experts \| down \| nvfp4 \| 4 \| (.*) \|$", card, re.M)
    assert rows == [" to ".join(dict.fromkeys(ends))]
    assert "Every byte was verified" in card
    assert f"| SHA-256 of moequant.json | {report.record_sha256} |" in card


def test_what_was_not_measured_is_said_and_why(converted, report):
    (layer,) = report.layers
    layer = replace(layer, quantized_activations_error=None, activations_not_measured="no scale")
    card = plan_push(converted, REPO, verification=replace(report, layers=(layer,))).card
    assert cells(card, str(layer.layer)) == ["0", "nvfp4", percent(layer.layer_error), "-"]
    assert "Layer 0 with activations: not measured, because no scale." in card


def test_the_card_is_one_that_the_hub_s_library_reads(converted, report):
    plan = plan_push(converted, REPO, verification=report, base_model="them/it")
    data = ModelCard(plan.card).data
    assert (data.base_model, data.base_model_relation) == ("them/it", "quantized")
    assert data.tags == ["moequant", "nvfp4", "compressed-tensors"]
    assert "[them/it](https://huggingface.co/them/it)" in plan.card


def test_only_engines_that_load_it_have_a_command_and_it_says_how_that_is_known(converted, report):
    card = plan_push(converted, REPO, verification=report).card
    assert f"```shell\nvllm serve {REPO}\n```" in card
    assert "| vLLM 0.33 | yes | its sources |" in card
    assert "| transformers 5.24 | no | a test |" in card
    assert "from_pretrained" not in card
    assert "* transformers 5.24: transformers 5.24 loads NVFP4 experts without" in card


def test_options_that_an_engine_needs_are_in_its_command(source, make_checkpoint, tmp_path):
    command = f"python -m sglang.launch_server --model-path {REPO} --moe-runner-backend"
    convert(source, tmp_path / "whole", format="mxfp4", dialect="fp8-ue8m0")
    card = plan_push(tmp_path / "whole", REPO).card
    assert f"SGLang 0.5.23:\n\n```shell\n{command} flashinfer_mxfp4\n```" in card
    odd = make_checkpoint(layers=1, experts=2, vocabulary=64, intermediate=192)
    convert(odd, tmp_path / "odd", format="mxfp4", dialect="fp8-ue8m0")
    card = plan_push(tmp_path / "odd", REPO, revision="mxfp4").card
    command = command.replace("--moe", "--revision mxfp4 --moe")
    gpus = "h100, h200, gh200, gh200-144gb, rtx5090, rtxpro6000, gb10"
    assert f"SGLang 0.5.23 on {gpus}:\n\n```shell\n{command} marlin\n```" in card
    gpus = "b200, gb200, b300, gb300"
    assert f"SGLang 0.5.23 on {gpus}:\n\n```shell\n{command} flashinfer_mxfp4\n```" in card


def test_an_unverified_checkpoint_has_no_errors_and_is_not_called_verified(copy):
    plan = plan_push(copy, REPO)
    assert plan.not_verified == (
        f"{copy}: was not verified; run moequant verify {copy} --against SOURCE"
    )
    assert "**Not verified:**" in plan.card
    assert "## Error" not in plan.card


def test_a_report_of_another_conversion_does_not_count(copy, report):
    record = copy / "moequant.json"
    record.write_text(record.read_text() + "\n")
    plan = plan_push(copy, REPO, verification=report)
    assert plan.not_verified is not None
    assert "was converted again since it was verified" in plan.not_verified
    assert "Every byte was verified" not in plan.card


def test_a_report_with_problems_is_refused(converted, report):
    with pytest.raises(MoequantError, match="has 1 problems"):
        plan_push(converted, REPO, verification=replace(report, problem_count=1))


def test_quality_is_shown_with_its_text(converted, report, tmp_path):
    figures = {
        "dtype": "float32", "as": "weights", "perplexity_reference": 8.0, "perplexity": 8.5,
        "kl_mean": 0.0625, "kl_mean_se": 0.005, "kl_99": 0.5, "same_top": 0.9375,
    }  # fmt: skip
    document = {
        "reference": "source", "tests": [{"name": str(converted), **figures}], "noise_floor": None,
        "data": {"sha256": "5" * 64, "windows": 16, "window_tokens": 512},
    }  # fmt: skip
    file = tmp_path / "quality.json"
    file.write_text(json.dumps(document))
    card = plan_push(converted, REPO, verification=report, quality=file).card
    assert cells(card, "this model")[1:] == ["8.500", "0.0625 ± 0.005", "0.5", "93.75 %"]
    assert "on 16 windows of 512 tokens (SHA-256 of the tokens " + "5" * 64 in card
    assert "its dequantized weights, in float32" in card


def test_a_quantized_source_and_a_recipe_of_several_rules_are_said(source, tmp_path):
    convert(source, tmp_path / "fp8", format="fp8_block")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[[rules]]\nroles = ["routed_experts"]\nlayers = "1:"\nformat = "mxfp4"\n\n'
        '[[rules]]\nroles = ["routed_experts"]\nformat = "nvfp4"\n'
    )
    out = tmp_path / "out"
    convert(tmp_path / "fp8", out, recipe=recipe)
    verified = verify(out, against=tmp_path / "fp8", layers=0)
    card = plan_push(out, REPO, verification=verified).card
    assert "with this recipe.toml:" in card
    assert 'layers = "1:"\nformat = "mxfp4"' in card
    assert len(re.findall(r"^\| routed_experts \| fp8_block \| (nvfp4|mxfp4) \|", card, re.M)) == 2
    assert {"mxfp4", "nvfp4"} <= {*ModelCard(card).data.tags}


def test_what_was_dequantized_is_no_quantized_model(source, tmp_path):
    convert(source, tmp_path / "fp8", format="fp8_block")
    out = tmp_path / "out"
    convert(tmp_path / "fp8", out, format="bf16")
    card = plan_push(out, REPO, base_model="them/it").card
    assert ModelCard(card).data.tags == ["moequant"]
    assert "base_model_relation" not in card
    assert "moequant convert them/it it-nvfp4 --format bf16" in card


def test_the_repository_of_the_record_is_the_base_model(copy):
    record = json.loads((copy / "moequant.json").read_text())
    record["source"] |= {"repository": "them/it", "revision": None, "commit": "0123456789" * 4}
    (copy / "moequant.json").write_text(json.dumps(record))
    plan = plan_push(copy, REPO)
    assert ModelCard(plan.card).data.base_model == "them/it"
    command = f"moequant convert them/it it-nvfp4 --revision {record['source']['commit']} --format"
    assert command in plan.card
    assert [w for w in plan.warnings if "base model" in w] == []


def test_what_the_card_lacks_is_a_warning(converted):
    warnings = plan_push(converted, REPO).warnings
    assert [w.split(";")[1].strip() for w in warnings] == [
        "give its id on the hub with --base-model owner/name",
        "check under which terms it may be published",
    ]


@pytest.mark.parametrize(
    ("link", "missing"),
    [
        ("LICENSE", True),
        ("./tokenizer.json", False),
        ("https://them.org/LICENSE", False),
        (3, False),
    ],
)
def test_a_link_to_a_license_that_is_not_there_is_a_warning(copy, link, missing):
    (copy / "README.md").write_text(
        f"---\nlicense: other\nlicense_name: theirs\nlicense_link: {link}\n---\n# It\n"
    )
    said = [w for w in plan_push(copy, REPO, base_model="them/it").warnings if "links to" in w]
    assert bool(said) is missing
    assert all(f"its license, {link}, but the checkpoint has no such file" in w for w in said)


def test_prepared_folders_that_are_not_there_are_a_warning(converted):
    said = plan_push(converted, REPO, include_prepared=True).warnings
    assert [w for w in said if "no prepared folder, so none is published" in w]


@pytest.mark.parametrize("repo_id", ["", "it", "me/it/that", "me/it that", "../it", "me/--it"])
def test_what_is_no_id_is_refused(converted, repo_id):
    with pytest.raises(ArgumentError, match="no id of a repository on the hub; write owner/name"):
        plan_push(converted, repo_id)


@pytest.mark.parametrize("name", ["", "a b", "a;b", "-a", "a..b", "a//b", "a/", "a.", "ä", "a\n"])
def test_what_is_no_branch_is_refused(converted, name):
    with pytest.raises(ArgumentError, match="no name of a branch; give letters, digits"):
        plan_push(converted, REPO, revision=name)


@pytest.mark.parametrize("name", ["main", "v1.0", "fp8/e8m0-2", "refs/pr/1"])
def test_a_branch_is_named_in_commands(converted, name):
    assert (
        f"vllm serve {REPO} --revision {name}\n" in plan_push(converted, REPO, revision=name).card
    )


def test_a_checkpoint_of_another_tool_is_refused(copy, source):
    (copy / "moequant.json").unlink()
    for path in (copy, source):
        with pytest.raises(CheckpointError, match=r"has no moequant\.json"):
            plan_push(path, REPO)


def test_a_missing_file_is_named(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        plan_push(copy, REPO)


def test_the_pictures_of_a_report_are_in_the_card_with_captions(
    source, converted, report, tmp_path
):
    page = tmp_path / "report.html"
    page.write_text(make_report([converted], against=source).to_html())
    plan = plan_push(converted, REPO, verification=report, report=page)
    for name, words in (("errors-gate-and-up", "gate and up"), ("errors-down", "down")):
        caption = rf"Error of {words} in out by layer and expert, from \S+ % \(dark\) to \S+ %"
        shown = rf"{caption} \(bright\):\n\n!\[{name}\]\(moequant-report/{name}\.svg\)"
        assert re.search(shown, plan.card)
        (file,) = (file for file in plan.extras if file.name == f"moequant-report/{name}.svg")
        assert file.content.startswith(b'<svg xmlns="http://www.w3.org/2000/svg"')
    (tmp_path / "errors-down.svg").write_text("<svg/>")
    with pytest.raises(MoequantError, match=r"errors-down\.svg: two files would have this name"):
        plan_push(converted, REPO, report=page, pictures=[tmp_path / "errors-down.svg"])


def test_files_with_one_name_and_no_picture_are_refused(converted, tmp_path):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "p.png", tmp_path / "a" / "p.png", tmp_path / "p.txt"):
        path.write_bytes(b"")
    with pytest.raises(MoequantError, match="two files would have this name"):
        plan_push(converted, REPO, pictures=[tmp_path / "p.png", tmp_path / "a" / "p.png"])
    with pytest.raises(MoequantError, match=r"p\.txt: not a picture; give files \.png"):
        plan_push(converted, REPO, pictures=[tmp_path / "p.txt"])


def test_notes_that_were_added_are_not_published(copy):
    (copy / "NOTES.md").write_text("of mine")
    (copy / ".hidden").write_text("of mine")
    plan = plan_push(copy, REPO)
    assert plan.left_out == ("NOTES.md",)
    assert {"NOTES.md", ".hidden"}.isdisjoint(f.name for f in plan.files)


def test_a_cell_stays_one_cell_and_code_stays_code():
    assert table(["a", ">b"], [("x|y\nz", 1)]) == "| a | b |\n| --- | ---: |\n| x\\|y z | 1 |"
    assert code_block("shell", "a\n```\nb") == "````shell\na\n```\nb\n````"


def test_of_a_plan_the_record_alone_is_digested(converted, monkeypatch):
    """To digest a terabyte takes half an hour."""
    read = []
    monkeypatch.setattr("moequant.publishing.files.sha256_of", lambda path: read.append(path.name))
    plan_push(converted, REPO)
    assert read == ["moequant.json"]
