"""The page: well-formed, self-contained, escaped, and what a person finds on it."""

from __future__ import annotations

import copy

import pytest

from moequant.reporting import make_report
from moequant.reporting.calibration_section import calibration_section
from moequant.reporting.page import render_page

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=y>&amp;\x00\u202e</style>"
# What chooses between texts of our own; saved results may hold no other values.
FIXED = {"verdict", "known", "method", "key"}


def test_a_page_has_the_verdict_and_a_figure_of_each_kind(report_of, read_page):
    html = report_of.to_html()
    page = read_page(html)
    assert "✓nvfp4: verified: every byte is what the recorded recipe gives from" in page.text
    sizes = page.rows("Bytes by role")
    assert sizes["routed_experts"][0] == "nvfp4"
    assert sizes["router"][-1] == "100 %"
    (total,) = page.tables["All weights of a format together"][1:]
    assert total[:2] == ["nvfp4", "24"]
    engines = page.rows("Engines, and numbers of ranks at which they load it")
    assert engines["vLLM 0.33"][0] == "✓ yes"
    assert engines["transformers 5.24"][0] == "✗ no"
    kernels = page.tables["Kernels of the experts on each GPU"]
    assert any("Humming (16-bit activations)" in row for row in kernels)
    title, *fits = page.tables["Least numbers of ranks at which the weights fit"]
    assert title[1].startswith("vLLM, ")
    assert [row[1:] for row in fits] == [["tp 1"] * (len(title) - 1)]
    assert page.rows("Codes and scales that were counted")["nvfp4"][0] == "24 of 24"
    assert page.rows("Files, by moequant.json")["config.json"]
    assert "moequant convert" in page.text


def test_options_of_an_engine_and_weights_that_fit_nowhere_are_told(report_of, read_page):
    saved = copy.deepcopy(report_of.document)
    for engine in saved["outputs"][0]["compatibility"]["engines"]:
        for gpu in engine["gpus"]:
            gpu["options"] = ["--some option"] if gpu["loads"] else []
        engine["fits_from"] = {
            name: {"tp": None if name == "l4" else 2, "tp_with_ep": None}
            for name in engine["fits_from"]
        }
    page = read_page(render_page(saved))
    kernels = page.tables["Kernels of the experts on each GPU"]
    assert any(cell.endswith("; started with --some option") for row in kernels for cell in row)
    _, *fits = page.tables["Least numbers of ranks at which the weights fit"]
    assert {row[1] for row in fits} == {"tp 2", "at none"}
    assert [row[0] for row in fits if row[1] == "at none"] == ["l4"]


def test_tables_have_headers_for_columns_and_rows_and_pictures_have_titles(report_of, read_page):
    page = read_page(report_of.to_html())
    assert all(rows[0] for rows in page.tables.values())
    scopes = {attributes.get("scope") for tag, attributes in page.tags if tag == "th"}
    assert scopes == {"col", "row"}
    for index, (tag, attributes) in enumerate(page.tags):
        if tag == "svg" and attributes.get("aria-hidden") != "true":
            assert attributes["role"] == "img"
            assert page.tags[index + 1][0] == "title"
    assert page.tags[0] == ("html", {"lang": "en"})


def test_a_planted_fault_heads_the_page_and_the_worst_tensors(faulty, reported_source, read_page):
    page = read_page(make_report([faulty], against=reported_source).to_html())
    assert "✗faulty: 4 problems against" in page.text
    worst = page.tables["Tensors that a problem names, then those of largest error"]
    flipped = "model.layers.1.mlp.experts.2.up_proj.weight_packed"
    wrong = "model.layers.0.mlp.experts.3.down_proj"
    problems = [row for row in worst if row[1] == "problem"]
    assert {row[0] for row in problems} == {flipped, f"{wrong}.weight_packed", f"{wrong}.weight"}
    first = next(row for row in worst[1:] if row[1] == "nvfp4")
    assert first[0] == f"{wrong}.weight"
    marks = [attributes for _, attributes in page.tags if attributes.get("class") == "mark"]
    assert len(marks) == 2


def test_several_outputs_are_side_by_side(outputs, reported_source, read_page):
    formats = ["nvfp4", "w4a8", "fp8_block"]
    page = read_page(make_report(map(outputs, formats), against=reported_source).to_html())
    head, *rows = page.tables["Figures of each output"]
    assert head == ["", *formats]
    found = {row[0]: row[1:] for row in rows}
    assert found["Format"] == [
        "nvfp4, as compressed-tensors", "w4a8, as compressed-tensors", "fp8_block, as fp8",
    ]  # fmt: skip
    assert [text.split(" ")[0] for text in found["Error of weights"]][2].startswith("2.6")
    assert found["Does not load in"] == ["transformers", "-", "-"]
    assert "KL divergence" not in found  # which nobody measured
    assert {f"output-{n}" for n in range(3)} <= {a.get("id") for _, a in page.tags}


def test_effective_errors_stand_beside_stored_ones_where_they_differ(
    outputs, reported_source, read_page
):
    caption = "All weights of a format together"
    page = read_page(make_report([outputs("w4a8")], against=reported_source).to_html())
    assert page.tables[caption][0][2:] == ["error stored", "SQNR", "error effective in vLLM"]
    page = read_page(make_report([outputs()], against=reported_source).to_html())
    assert page.tables[caption][0][2:] == ["error", "SQNR"]


def test_what_was_not_measured_is_said_and_not_shown(outputs, read_page):
    page = read_page(make_report([outputs()]).to_html())
    assert "?nvfp4: its files are those that were written. It was not compared" in page.text
    assert "Error of weights" not in page.text
    assert "Not measured" in page.text
    assert f"moequant report {outputs()} --against SOURCE" in page.text
    # The record has the sizes of the source's files, though not by role.
    assert page.rows("Bytes by role")["routed_experts"][1] == "-"


def poisoned(value, fixed, key=None):
    if isinstance(value, dict):
        return {k: poisoned(v, fixed, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, fixed, key) for v in value]
    return HOSTILE if isinstance(value, str) and key not in fixed else value


@pytest.mark.parametrize("kept", [{"role", "projection", "check"}, set()])
def test_every_text_is_escaped(faulty, reported_source, read_page, evaluation, kept):
    document = make_report([faulty], against=reported_source).document
    document = {**document, "evaluations": [evaluation]}
    html = render_page(poisoned(document, FIXED | kept))
    page = read_page(html)  # which refuses scripts, handlers and what is outside
    assert page.text.count("<script>alert(1)</script>") > 100
    assert "\x00" not in html
    assert "\u202e" not in html
    assert html.count("</style>") == 1
    clean = read_page(render_page(document))
    # Without roles there are no heat maps.
    lost = {tag for tag, _ in clean.tags} - {tag for tag, _ in page.tags}
    assert lost == (set() if kept else {"image"})
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in clean.tags}


def test_long_names_are_cut(report_of, read_page):
    document = copy.deepcopy(report_of.document)
    document["outputs"][0]["verification"]["worst_weights"][0]["name"] = "n" * 100_000
    assert len(render_page(document)) < 200_000


@pytest.fixture
def evaluation():
    figures = {
        "dtype": "float32", "run_as": "weights", "backends": [], "positions": 96,
        "perplexity": 31.25, "perplexity_reference": 28.08, "kl_mean_se": 0.0034,
        "kl_median": 0.0875, "kl_99": 0.62, "kl_999": 1.68, "same_top": 0.8164,
    }  # fmt: skip
    return {
        "reference": "source",
        "tests": [{"name": "out", "kl_mean": 0.1175, **figures}],
        "noise_floor": {"name": "noise floor", "kl_mean": 0.0005, **figures},
        "kl": "KL in nats",
        "data": {"windows": 4, "window_tokens": 256},
        "peak_bytes": 10**9,
        "seconds": 12.0,
    }


def test_quality_is_shown_with_its_noise_floor(report_of, evaluation, read_page):
    document = copy.deepcopy(report_of.document)
    document["evaluations"] = [evaluation]
    document["outputs"][0]["evaluated_as"] = [0, 0]
    page = read_page(render_page(document))
    assert "KL divergence0.117 ± 0.0034 noise floor 0.0005" in page.text
    assert "Same top token81.6 %" in page.text
    assert page.rows("Figures of an evaluation")["out"][1:3] == ["31.25", "0.117 ± 0.0034"]


def test_calibration_is_shown_with_fallbacks(
    outputs, reported_source, measure, tmp_path, read_page
):
    stats = measure(reported_source, tmp_path / "stats", prior_tokens=64)
    page = read_page(make_report([outputs()], statistics=stats).to_html())
    assert "Of 8 experts, 2 saw no token" in page.text
    rows = page.rows("Tokens and largest magnitudes of each layer")
    assert rows["0"][:3] == ["0", "45", "90"]
    assert rows["0"][-2:] == ["0", "1-2"]


def test_many_tokens_are_no_fault_and_experts_without_any_have_a_frame():
    layer = {
        "layer": 0, "tokens": [0, 3, 4, 2000], "unrouted": [0], "mostly_pooled": [1, 2],
        "hidden_amax": 3.0, "intermediate_amax": 4.0,
    }  # fmt: skip
    data = {"tokens": 2007, "windows": 4}
    page = calibration_section({"experts": 4, "prior_tokens": 64, "data": data, "layers": [layer]})
    for words in ("<span>0 tokens</span>", "<span>2,000 tokens</span>", "</i>no token</span>"):
        assert words in page
    assert "above" not in page
    assert page.count('class="mark"') == 1


LARGE = {"layers": 61, "experts": 256}


def large_document(document, *, outputs):
    """The document with errors and tokens of a model with 61 layers of 256 experts."""
    layers, experts = LARGE["layers"], LARGE["experts"]
    document = copy.deepcopy(document)
    output = document["outputs"][0]
    value = (0.08 + 0.02 * (i * 7919 % 1000) / 1000 for i in range(10**9))
    output["verification"]["errors"] = [
        {
            "role": "routed_experts", "layer": layer, "projection": projection,
            "format": "nvfp4", "weights": experts, "relative_error": 0.09,
            "experts": [round(next(value), 5) for _ in range(experts)],
        }
        for layer in range(layers)
        for projection in ("gate", "up", "down")
    ]  # fmt: skip
    document["calibration"] = {
        "sha256": "0" * 64, "run": {}, "top_k": 8, "hessian": False, "experts": experts,
        "prior_tokens": 64, "data": {"tokens": 65536, "windows": 128},
        "layers": [
            {
                "layer": layer, "tokens": [(37 * e * layer) % 4001 for e in range(experts)],
                "unrouted": [0, 1], "mostly_pooled": [*range(2, experts, 2)],
                "hidden_amax": 3.0, "intermediate_amax": 4.0,
            }
            for layer in range(layers)
        ],
    }  # fmt: skip
    copies = [{**output, "name": f"output {n}"} for n in range(outputs)]
    return {**document, "outputs": copies}


def test_the_page_of_four_outputs_of_a_large_model_is_small(report_of, read_page):
    html = render_page(large_document(report_of.document, outputs=4))
    page = read_page(html)
    assert len(html.encode()) < 5e6
    # The 61 x 256 experts of an output are pixels of two pictures, of which a third is the key;
    # so are their tokens.
    assert len(page.tags) < 12_000
    assert len([tag for tag, _ in page.tags if tag == "image"]) == 4 * 3 + 2
