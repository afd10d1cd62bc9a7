from __future__ import annotations

import pytest

from moequant.conversion.rounding import options_of_format
from moequant.dialects import REGISTRY as DIALECTS
from moequant.dialects import default_dialect
from moequant.formats import CONVERTIBLE as FORMATS
from moequant.runtime.backends import REGISTRY as BACKENDS


@pytest.fixture
def document(run):
    return run("formats", "--json").document


def test_every_format_is_listed_with_its_options_and_dialect(document):
    assert [f["name"] for f in document["formats"]] == list(FORMATS)
    for row in document["formats"]:
        format = FORMATS[row["name"]]
        assert row["default_dialect"] == default_dialect(format.name)
        assert {k: o["default"] for k, o in row["options"].items()} == {
            name: values[0] for name, values in options_of_format(format.name).items()
        }


def test_bits_a_weight_count_codes_and_scales(document):
    # 8 + 32 / 128**2, rounded; 4 + 8 / 16; 4 + 8 / 32; 4 + 16 / 128; 8 + 32 / 4096; 8 + 8 / 32.
    bits = {f["name"]: f["bits_per_weight"] for f in document["formats"]}
    four_bits = {"nvfp4": 4.5, "mxfp4": 4.25, "w4a8": 4.125}
    # One scale for a matrix is not counted: 8 + 32 / (N * K).
    eight_bits = {"fp8_block": 8.002, "fp8_channel": 8.008, "mxfp8": 8.25, "fp8_tensor": 8.0}
    assert bits == eight_bits | four_bits


def test_every_dialect_is_listed_with_what_it_carries(document):
    assert {d["name"]: d["formats"] for d in document["dialects"]} == {
        name: list(dialect.carried) for name, dialect in DIALECTS.items()
    }


def test_every_backend_runs_every_format_here_or_says_why_not(document):
    rows = document["backends"]
    assert {(r["backend"], r["format"]) for r in rows} == {
        (b, f) for b in BACKENDS for f in FORMATS
    }
    assert all(row["runs"] == (row["reason"] is None) for row in rows)
    by_default = {r["format"] for r in rows if r["device"] == "cpu" and r["by_default"]}
    assert by_default == set(FORMATS)


def test_a_backend_is_asked_with_the_activations_that_it_is_for(document):
    """Else deepgemm_fp4 would say that it takes others, and never what it lacks here."""
    rows = {(r["backend"], r["format"]): r for r in document["backends"] if r["device"] == "cpu"}
    for name, format, activations in (
        ("deepgemm_fp4", "mxfp4", "mxfp8"),
        ("cutlass_fp4", "nvfp4", "nvfp4"),
        ("cutlass_fp4", "mxfp4", "mxfp4"),
        ("sm90_mxfp4_fp8", "mxfp4", "fp8_token"),
        ("sm90_w4a16", "mxfp4", "none"),
        ("sm90_fp8_block", "fp8_block", "fp8_group128"),
    ):
        row = rows[name, format]
        assert (row["activations"], row["reason"]) == (activations, "needs a CUDA device")
    sizes = {
        r["backend"]: (r["hidden_multiple"], r["intermediate_multiple"]) for r in rows.values()
    }
    assert sizes == {name: backend.multiples for name, backend in BACKENDS.items()}
    assert sizes["deepgemm_fp4"] == (128, 128)


def test_one_quantizer_converts_by_default_and_others_say_why_not(document, run, monkeypatch):
    rows = {row["quantizer"]: row for row in document["quantizers"]}
    assert rows["native"]["by_default"]
    assert rows["native"]["reason"] is None
    assert rows["torch"]["runs"]
    assert not rows["torch"]["by_default"]
    monkeypatch.setenv("MOEQUANT_QUANTIZER", "torch")
    rows = {row["quantizer"]: row for row in run("formats", "--json").document["quantizers"]}
    assert rows["torch"]["by_default"]
    assert not rows["native"]["runs"]
    assert rows["native"]["reason"] == "MOEQUANT_QUANTIZER=torch"


def test_people_see_every_name(run):
    shown = run("formats").stdout
    assert all(name in shown for name in [*FORMATS, *DIALECTS])
    options = {name for format in FORMATS for name in options_of_format(format)}
    assert all(name in shown for name in options)


def test_backends_are_another_page(run):
    shown = run("formats", "--backends").stdout
    assert all(name in shown for name in BACKENDS)
    assert "column_order" not in shown
    words = " ".join(shown.split())
    said = "no: needs a CUDA device; compiled, never run"
    assert f"deepgemm_fp4 mxfp4 mxfp8 128, 128 {said}" in words
    assert f"cutlass_fp4_batched nvfp4 nvfp4 32, 32 {said}" in words


def test_backends_are_asked_with_the_activations_that_are_named(run):
    rows = run("formats", "--activations", "fp8_tensor", "--json").document["backends"]
    assert {row["activations"] for row in rows} == {"fp8_tensor"}
    reasons = {(row["backend"], row["format"]): row["reason"] for row in rows}
    for backend in ("sm90_fp8_channel", "cutlass_fp8", "cutlass_fp8_batched", "triton"):
        assert reasons[backend, "fp8_channel"] == "needs a CUDA device"
    assert reasons["torch_reference", "fp8_tensor"] is None
    assert reasons["sm90_w4a8", "w4a8"] == "takes only activations in fp8_token"
    words = " ".join(run("formats", "--backends", "--activations", "fp8_tensor").stdout.split())
    assert "sm90_fp8_channel fp8_channel, fp8_tensor fp8_tensor 32, 16 no: needs a CUDA" in words
    done = run("formats", "--activations", "fp8_tensor")
    assert done.exit_code == 2
    assert "--activations needs --backends or --json" in done.stderr


def test_formats_of_which_a_backend_says_the_same_share_a_line(run):
    words = " ".join(run("formats", "--backends").stdout.split())
    assert "sm90_w4a16 nvfp4, mxfp4 none no: needs a CUDA device sm90_fp8_channel" in words


def test_backends_that_no_gpu_has_run_are_marked(document):
    rows = document["backends"]
    assert {r["backend"] for r in rows if r["never_run"]} == {
        "cutlass_fp4", "cutlass_fp4_batched", "deepgemm_fp4", "deepgemm_fp4_batched"
    }  # fmt: skip
    assert not any(r["by_default"] for r in rows if r["never_run"])
    assert all("runs only" not in r["reason"] for r in rows if r["never_run"])


def test_a_format_that_a_backend_has_no_kernels_for_has_no_line(run, document):
    assert "runs only" not in run("formats", "--backends").stdout
    for row in document["backends"]:
        refused = (row["reason"] or "").startswith("runs only ")
        assert row["has_kernels"] == (not refused)
    of = {(r["backend"], r["format"]) for r in document["backends"] if r["has_kernels"]}
    assert {(b, f) for b, f in of if b == "cutlass_fp4"} == {
        ("cutlass_fp4", "nvfp4"), ("cutlass_fp4", "mxfp4")
    }  # fmt: skip


def test_a_pair_that_a_backend_has_no_kernels_for_has_no_mark(run):
    asked = run("formats", "--activations", "mxfp8", "--json").document["backends"]
    marked = {(r["backend"], r["format"]) for r in asked if r["never_run"]}
    assert marked == {("deepgemm_fp4", "mxfp4"), ("deepgemm_fp4_batched", "mxfp4")}


@pytest.mark.parametrize(("scheme", "group"), [("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)])
def test_sizes_are_those_of_the_activations_too(run, scheme, group):
    rows = run("formats", "--activations", scheme, "--json").document["backends"]
    (row,) = (r for r in rows if (r["backend"], r["format"]) == ("torch_reference", "fp8_block"))
    assert (row["hidden_multiple"], row["intermediate_multiple"]) == (group, group)
    words = " ".join(run("formats", "--backends", "--activations", scheme).stdout.split())
    assert f"{scheme} {group}, {group} by default" in words
