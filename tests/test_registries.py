"""Every table beside formats.CONVERTIBLE has a row for each format, or a reason here why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moequant import dialects
from moequant.formats import CONVERTIBLE, REGISTRY, quantize
from moequant.models import architectures
from moequant.preparation.layers import backends_for
from moequant.quantizers import NativeQuantizer
from moequant.quantizers.kernels import KERNELS
from moequant.runtime.activations import SCHEMES, quantize_activations
from moequant.runtime.backends import TARGETS
from moequant.verification.bounds import find_out_of_bound
from moequant.verification.decode import decode

CARRIED = {
    "fp8": ({"fp8_block"}, "its consumers read FP8 blocks alone"),
    "fp8-ue8m0": ({"fp8_block", "mxfp4"}, "as fp8, and SGLang reads MXFP4 experts in it"),
    "deepseek-v4": ({"fp8_block", "mxfp4"}, "DeepSeek-V4 was released in these alone"),
    "w4afp8": ({"w4a8", "fp8_block"}, "SGLang takes experts for INT4 and the rest for FP8 blocks"),
    "gpt-oss": ({"mxfp4"}, "gpt-oss was released in MXFP4 alone"),
    "modelopt": (
        {"nvfp4", "fp8_tensor"},
        "its docstring says what engines read of the others, and where",
    ),
}
"""What a dialect carries, and why it does not carry every format."""

every_format = pytest.mark.parametrize("format", CONVERTIBLE)


def weight(format):
    w = torch.randn((128, 256), generator=torch.Generator().manual_seed(0)) * 0.02
    return w, quantize(w, format)


@pytest.mark.parametrize("dialect", dialects.REGISTRY)
def test_every_dialect_carries_every_format_or_says_why_not(dialect):
    carried, _ = CARRIED.get(dialect, (CONVERTIBLE.keys(), None))
    assert {*dialects.get_dialect(dialect).carried} == carried


@every_format
def test_every_format_has_a_dialect(format):
    assert dialects.default_dialect(format) in dialects.REGISTRY


def test_dialects_that_an_architecture_names_are_there_and_serve_it():
    for architecture in architectures():
        for name in architecture.dialects or ():
            assert architecture.stacked or not dialects.get_dialect(name).stacks
    # One that stacks serves those that name it alone.
    named = {name for architecture in architectures() for name in architecture.dialects or ()}
    assert {d.name for d in dialects.REGISTRY.values() if d.stacks} <= named


@pytest.mark.parametrize("target", TARGETS)
@every_format
def test_every_target_has_a_backend_for_every_format(format, target):
    assert backends_for(format, target)


def test_every_format_has_a_kernel_of_the_native_quantizer():
    for format in CONVERTIBLE.values():
        assert (format.element.name, format.scale_dtype) in KERNELS


@pytest.mark.parametrize("format", [n for n, f in REGISTRY.items() if "read" in f.uses])
def test_the_native_quantizer_decodes_every_format(format):
    # Compares what it compiles with the reference.
    NativeQuantizer().prepare_decoding(format, torch.float32)


@pytest.mark.parametrize(
    "head",
    [
        "| format | element |",
        "| format | `qdata` |",
        "| format | options |",
        "| format | dialect | tensor |",
        "| dialect | format | `quant_method` |",
    ],
)
def test_tables_of_the_page_of_formats_have_every_format(head):
    page = (Path(__file__).parents[1] / "docs/formats.md").read_text("utf-8")
    table = page[page.index(head) :].split("\n\n")[0]
    assert [format for format in CONVERTIBLE if f"`{format}`" not in table] == []


def test_exceptions_are_about_what_there_is():
    assert CARRIED.keys() <= dialects.REGISTRY.keys()


@every_format
def test_verification_bounds_every_format(format):
    w, q = weight(format)
    assert find_out_of_bound(w, q, q, 0.0) is None


@every_format
def test_verification_decodes_every_format_by_its_own_tables(format):
    _, q = weight(format)
    # Default scales are powers of two, or leave room in float32: nothing is rounded.
    assert torch.equal(decode(q), CONVERTIBLE[format].dequantize(q).double())


@every_format
def test_the_runtime_knows_how_every_format_s_activations_are_fed(format):
    scheme = CONVERTIBLE[format].activations
    assert scheme in SCHEMES
    assert quantize_activations(torch.ones(3, 256), scheme).dequantize().shape == (3, 256)
