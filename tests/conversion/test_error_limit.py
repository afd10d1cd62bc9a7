"""A format that destroys a weight is refused, by a conversion and by `verify`."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moequant.cli import cli
from moequant.conversion import Recipe, convert, error_limit
from moequant.errors import NumericsError
from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.verification import verify

EXPERT = "model.layers.1.mlp.experts.1"
EXPERTS = ".mlp.experts."


@pytest.fixture
def scaled(make_checkpoint, tmp_path):
    """scaled(change): a checkpoint whose experts have the weights change(name, w), in BF16."""

    def make(change):
        source = make_checkpoint(path=tmp_path / "source")
        for file in source.glob("*.safetensors"):
            tensors = load_file(file)
            for name, w in tensors.items():
                if EXPERTS in name:
                    tensors[name] = change(name, w.float()).bfloat16()
            save_file(tensors, file, metadata={"format": "pt"})
        return source

    return make


def gate_of_200_beside_up_of_2e6(name, w):
    if not name.startswith(EXPERT):
        return w
    size = {"gate": 200, "up": 2e-6}.get(name.split(".")[-2].removesuffix("_proj"))
    return w if size is None else w * (size / w.abs().max())


def times(factor):
    """All experts' weights, which are N(0, 0.02) with two large columns, times a factor."""
    return lambda name, w: w * factor


DESTROYED = [
    pytest.param("nvfp4", gate_of_200_beside_up_of_2e6, id="up far below gate"),
    pytest.param("fp8_tensor", gate_of_200_beside_up_of_2e6, id="up far below gate's only scale"),
    pytest.param("w4a8", times(1e-8), id="w4a8, weights of 2e-10"),
    pytest.param("w4a8", times(1e-30), id="w4a8, weights of 2e-32"),
    pytest.param("mxfp4", times(1e-38), id="mxfp4, weights of 2e-40"),
]


@pytest.mark.parametrize(("format", "change"), DESTROYED)
def test_a_format_that_destroys_a_weight_ends_the_conversion(scaled, tmp_path, format, change):
    source, out = scaled(change), tmp_path / "out"
    run = CliRunner().invoke(cli, ["convert", str(source), str(out), "--format", format])
    assert run.exit_code == NumericsError.exit_code
    assert isinstance(run.exception, SystemExit)
    assert 'Keep the experts of its layer (format = "keep" in a recipe)' in run.stderr
    assert "start over with --overwrite (overwrite=True). It is in " in run.stderr
    assert not list(out.glob("*.safetensors"))


def test_the_weight_that_is_destroyed_is_named_and_keeping_its_layer_helps(scaled, tmp_path):
    source, out = scaled(gate_of_200_beside_up_of_2e6), tmp_path / "out"
    with pytest.raises(NumericsError, match=rf"^{EXPERT}\.up_proj\.weight: off by 100% in nvfp4"):
        convert(source, out, format="nvfp4")
    experts = {"roles": ["routed_experts"]}
    rules = [experts | {"layers": "1", "format": "keep"}, experts | {"format": "nvfp4"}]
    recipe = Recipe.model_validate({"rules": rules})
    convert(source, out, recipe=recipe, overwrite=True)
    assert verify(out, against=source).ok


def convert_without_limit(monkeypatch, source, out, format):
    """Convert as a tool without the limit would."""
    with monkeypatch.context() as patch:
        patch.setattr(error_limit, "LIMIT", float("inf"))
        convert(source, out, format=format)


@pytest.mark.parametrize("record", [True, False])
def test_verify_does_not_call_destroyed_experts_right(monkeypatch, scaled, tmp_path, record):
    source, out = scaled(gate_of_200_beside_up_of_2e6), tmp_path / "out"
    convert_without_limit(monkeypatch, source, out, "nvfp4")
    if not record:
        (out / "moequant.json").unlink()
    report = verify(out, against=source, layers="all")
    assert not report.ok
    problem = next(p for p in report.problems if p.name == f"{EXPERT}.up_proj.weight")
    assert problem.message.startswith("off by 100% in nvfp4")
    assert problem.message.endswith("quantize again from the source")
    (summary,) = report.formats
    assert summary.worst.name == f"{EXPERT}.up_proj.weight"
    assert summary.worst.relative_error == 1
    # Taken together they look ordinary, for large weights are most of the sum.
    assert summary.total.relative_error < 0.15


def test_a_layer_no_nearer_than_zeros_is_a_problem(monkeypatch, scaled, tmp_path):
    source, out = scaled(times(1e-8)), tmp_path / "out"
    convert_without_limit(monkeypatch, source, out, "w4a8")
    report = verify(out, against=source, layers="all")
    messages = [problem.message for problem in report.problems if problem.check == "layers"]
    assert len(messages) == 2
    assert all("zeros would be as near" in message for message in messages)


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e-6, 1e20, 1e37])
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_extreme_sizes_that_a_format_holds_are_converted_and_right(
    scaled, tmp_path, format, factor
):
    """Whatever the format, the layers overflow or underflow in float32; verify leaves these out."""
    source = scaled(times(factor))
    convert(source, tmp_path / "out", format=format)
    report = verify(tmp_path / "out", against=source, layers="all")
    assert report.ok, report.problems
    (summary,) = report.formats
    assert summary.worst.relative_error < 1.1 * get_format(format).ordinary_error


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_outlier_channels_pass(scaled, tmp_path, format):
    def with_outliers(name, w):
        w[:, ::64] *= 20
        return w

    source = scaled(with_outliers)
    convert(source, tmp_path / "out", format=format)
    report = verify(tmp_path / "out", against=source, layers="all")
    assert report.ok, report.problems


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_weights_of_any_size_have_the_ordinary_error_until_a_scale_underflows(format):
    wanted = get_format(format)
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    lost = []
    for exponent in range(-140, 120, 2):
        scaled = w * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
        q = wanted.quantize(scaled)
        lost.append(wanted.underflows(q))
        error = (dequantize(q).double() - scaled.double()).norm() / scaled.double().norm()
        # The measured error of 131 072 weights is within 5 % of the expected one.
        assert lost[-1] or error < 1.05 * wanted.ordinary_error, exponent
    # Scales underflow for the smallest weights only.
    assert lost == sorted(lost, reverse=True)
    assert not lost[len(lost) // 2]
    assert lost[0]


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_blocks_with_scales_in_range_stay_within_the_limit(format):
    """One large weight in each block, and others just below half of the smallest step."""
    wanted = get_format(format)
    if wanted.is_plain:
        pytest.skip("without scales")
    worst = 0.0
    for large in torch.arange(2, 17, 0.25).tolist():
        for small in (0.24, 0.249, 0.45, 0.49, 0.74, 0.75, 2.5, 5.0):
            w = torch.full((128, 256), small)
            w[:, :: wanted.block[1]] = large
            q = wanted.quantize(w)
            assert not wanted.underflows(q)
            worst = max(worst, float((dequantize(q) - w).norm() / w.norm()))
    assert worst <= error_limit.LIMIT * wanted.ordinary_error


@pytest.mark.parametrize(
    ("signal", "noise"), [(1.0, math.nan), (math.nan, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite_is_called_so_and_not_too_small(signal, noise):
    assert error_limit.beyond_limit("fp8_block", signal, noise) == (
        "has NaN or infinity, itself or where it is decoded from fp8_block"
    )
