"""The dialect for what only moequant's runtime loads."""

from __future__ import annotations

import pytest
import torch

from moequant.dialects import find_dialect, get_dialect
from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE, dequantize, quantize

DIALECT = get_dialect("moequant")
EXPERT = "model.layers.3.mlp.experts.7.down_proj"
ROUTER = "model.layers.3.mlp.router"


def test_ragged_blocks_come_back_as_they_were():
    q = quantize(torch.randn(130, 129, generator=torch.Generator().manual_seed(0)), "fp8_block")
    tensors = DIALECT.to_disk(EXPERT, q)
    assert tensors[f"{EXPERT}.weight_scale"].shape == (2, 2)
    assert torch.equal(dequantize(DIALECT.from_disk(EXPERT, "fp8_block", tensors)), dequantize(q))


def test_formats_may_differ_from_layer_to_layer():
    layers = dict(enumerate(CONVERTIBLE))
    formats = {f"model.layers.{i}.mlp.experts.0.up_proj": f for i, f in layers.items()}
    config = DIALECT.quantization_config(formats, [ROUTER])
    format_of = find_dialect(config).reader(config)
    assert {module: format_of(module) for module in formats} == formats
    assert format_of(ROUTER) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema_version": 2},
            "schema_version is 2, but this version of moequant reads 1; update",
        ),
        ({"schema_version": None}, "schema_version is None"),
        (
            {"targets": {"int3": ["re:.*"]}},
            "targets has 'int3', but this version of moequant reads only fp8_blo",
        ),
    ],
)
def test_what_a_later_moequant_wrote_is_refused(change, message):
    config = DIALECT.quantization_config({EXPERT: "mxfp4"}, []) | change
    with pytest.raises(UnsupportedError, match=message):
        DIALECT.reader(config)(EXPERT)


@pytest.mark.parametrize("format", DIALECT.encodings)
def test_no_part_is_taken_for_a_weight_by_those_who_do_not_know_the_dialect(format):
    assert "weight" not in DIALECT.encodings[format].suffixes
