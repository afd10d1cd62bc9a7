"""Layers run where they are served, and compared with the CPU reference; all of it on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from moequant.conversion import convert
from moequant.errors import ArgumentError, UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import naive_batched
from moequant.verification import pipeline, verify
from moequant.verification.serving import (
    MOST_FP4_ERROR,
    MOST_FP4_TOKEN_ERROR,
    MOST_QUANTIZATION_ERROR,
    MOST_ROUNDING_ERROR,
    most_error,
)
from moequant.weights.converted import ConvertedCheckpoint

# On a CPU both compute as the reference does, and round the output to bfloat16.
BFLOAT16 = 2.0**-9
RUN_EXPERT = naive_batched.run_expert


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """converted(format) -> a converted checkpoint, not to be changed."""
    made = {}

    def make(format):
        if format not in made:
            output = tmp_path_factory.mktemp(format) / "converted"
            made[format] = convert(source, output, format=format).output
        return made[format]

    return make


@pytest.fixture
def naive(monkeypatch):
    """naive(change): naive_batched gives change(x, y) for an expert's input x and output y."""

    def make(change):
        def run(x, weights, e, scheme):
            return change(x, RUN_EXPERT(x, weights, e, scheme))

        monkeypatch.setattr(naive_batched, "run_expert", run)

    return make


def test_by_default_layers_run_on_the_reference_alone(source, converted):
    for layer in verify(converted("mxfp4"), against=source).layers:
        assert (layer.backend, layer.device) == ("torch_reference", "cpu")
        assert layer.backend_error is None


@pytest.mark.parametrize("backend", ["torch_reference", "naive_batched"])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_backend_that_computes_the_same_passes(source, converted, format, backend):
    report = verify(converted(format), against=source, device=torch.device("cpu"), backend=backend)
    assert report.ok, report.problems
    assert [layer.layer for layer in report.layers] == [0, 1]
    for layer in report.layers:
        assert (layer.backend, layer.device) == (backend, "cpu")
        assert 0 < layer.backend_error <= BFLOAT16
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert {layer["backend"] for layer in document["layers"]} == {backend}


def test_its_layers_are_compared_with_the_source_as_by_default(source, converted):
    default = verify(converted("w4a8"), against=source).layers
    served = verify(converted("w4a8"), against=source, backend="naive_batched").layers
    for one, other in zip(default, served, strict=True):
        assert one.runtime_error == other.runtime_error
        assert one.layer_error == other.layer_error
        assert one.quantized_activations_error == other.quantized_activations_error


def test_biases_are_served_too(make_checkpoint, tmp_path):
    source = make_checkpoint(model_type="gpt_oss", experts=2, hidden=256, intermediate=256)
    output = convert(source, tmp_path / "out", format="mxfp4").output
    assert ConvertedCheckpoint.open(output).read_biases(0)["up"].any()
    report = verify(output, against=source, backend="naive_batched")
    assert report.ok, report.problems
    assert len(report.layers) == 2
    assert all(layer.backend_error <= BFLOAT16 for layer in report.layers)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: y * 1.1,
        lambda x, y: y.roll(1, 0),
        lambda x, y: torch.full_like(y, torch.nan),
        lambda x, y: torch.zeros_like(y),
    ],
    ids=["scaled", "other rows", "nan", "zeros"],
)
@pytest.mark.parametrize("format", ["nvfp4", "fp8_block"])
def test_a_backend_that_computes_something_else_is_named(source, converted, naive, format, change):
    naive(change)
    report = verify(converted(format), against=source, backend="naive_batched")
    assert [(p.check, p.name) for p in report.problems] == [
        ("backend", "layer 0"),
        ("backend", "layer 1"),
    ]
    assert all("naive_batched on cpu is off" in p.message for p in report.problems)
    # Nothing is wrong with the checkpoint, nor with the reference.
    assert all(layer.runtime_error <= 1 for layer in report.layers)
    assert verify(converted(format), against=source).ok


def test_activations_quantized_where_the_format_has_none_are_found(source, converted, naive):
    # The output in E4M3: 2**-4 / sqrt(3) of the norm at most, 2.6 % on average.
    naive(lambda x, y: quantize_activations(y, "fp8_token").dequantize())
    report = verify(converted("nvfp4"), against=source, backend="naive_batched")
    assert {p.check for p in report.problems} == {"backend"}
    assert all(layer.backend_error > MOST_ROUNDING_ERROR for layer in report.layers)


def test_roundings_to_bfloat16_pass(source, converted, naive):
    naive(lambda x, y: y.bfloat16().float())
    for format in ("nvfp4", "fp8_block"):
        report = verify(converted(format), against=source, backend="naive_batched")
        assert report.ok, report.problems
        assert all(layer.backend_error <= 2 * BFLOAT16 for layer in report.layers)


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_the_limit_is_that_of_the_activations(format):
    scheme = CONVERTIBLE[format].activations
    limit = MOST_ROUNDING_ERROR if scheme == "none" else MOST_QUANTIZATION_ERROR
    assert most_error(scheme, tokens=16) == limit


def test_four_bit_activations_have_limits_of_their_own():
    assert most_error("nvfp4_static", tokens=16) == MOST_FP4_ERROR
    assert most_error("mxfp4", tokens=1) == MOST_FP4_TOKEN_ERROR


def test_layers_with_static_scales_are_served_by_them(source, tmp_path, monkeypatch):
    schemes = set()
    convert(source, tmp_path / "out", format="fp8_tensor", activation_scales=0.01)

    def run(x, weights, e, scheme):
        schemes.add(scheme)
        return RUN_EXPERT(x, weights, e, scheme)

    monkeypatch.setattr(naive_batched, "run_expert", run)
    report = verify(tmp_path / "out", against=source, backend="naive_batched")
    assert report.ok, report.problems
    assert schemes == {"fp8_static"}
    assert all(layer.backend_error <= BFLOAT16 for layer in report.layers)


def test_a_backend_that_cannot_use_static_scales_is_refused(source, tmp_path):
    convert(source, tmp_path / "out", format="nvfp4", activation_scales=0.01)
    with pytest.raises(UnsupportedError, match="nvfp4_static"):
        verify(tmp_path / "out", against=source, backend="naive_batched")
    report = verify(tmp_path / "out", against=source, backend="torch_reference")
    assert report.ok, report.problems
    assert all(layer.backend_error <= BFLOAT16 for layer in report.layers)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backend": "cutlass"}, r"unknown backend 'cutlass'; use one of: .*naive_batched"),
        (
            {"backend": "sm90_fp8_block"},
            r"(?s)'sm90_fp8_block' does not run fp8_block .* CUDA device",
        ),
        ({"device": "tpux"}, "device 'tpux' cannot be used"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"device": "meta"}, r"(?s)no backend runs fp8_block .* needs a device that holds numbers"),
    ],
)
def test_what_cannot_run_here_is_refused_before_weights_are_compared(
    source, converted, monkeypatch, asked, message
):
    folder = converted("fp8_block")
    monkeypatch.setattr(pipeline, "check_weights", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(UnsupportedError, match=message):
        verify(folder, against=source, **asked)


@pytest.mark.parametrize("asked", [{"backend": "naive_batched"}, {"device": "cuda"}])
def test_a_backend_for_no_layer_is_refused(source, converted, asked):
    with pytest.raises(ArgumentError, match=r"layers = 0 runs no layer"):
        verify(converted("mxfp4"), against=source, layers=0, **asked)
