"""Codes and scales that are counted are those in the files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from moequant.reporting import codes, make_report


def counted(output):
    (found,) = make_report([output]).document["outputs"][0]["codes"]
    return found


def tensors_of(output, suffix):
    (shard,) = output.glob("*.safetensors")
    return [t for name, t in load_file(shard).items() if name.endswith(suffix)]


def test_codes_of_nvfp4_are_those_of_both_nibbles(outputs):
    packed = torch.cat([t.flatten() for t in tensors_of(outputs(), ".weight_packed")])
    nibbles = torch.cat([packed & 15, packed >> 4]) & 7  # without the sign
    found = counted(outputs())
    assert (found["format"], found["weights"], found["counted"]) == ("nvfp4", 24, 24)
    assert found["codes"] == nibbles.numel()
    assert found["zero"] == int((nibbles == 0).sum())
    assert found["saturated"] == int((nibbles == 7).sum())
    assert found["nan"] == 0
    assert sum(found["weights_by_zero"]) == sum(found["weights_by_saturated"]) == 24


def test_codes_of_fp8_are_bytes(outputs):
    shards = tensors_of(outputs("fp8_block"), "_proj.weight")
    values = torch.cat([t.float().flatten() for t in shards if t.dtype == torch.float8_e4m3fn])
    found = counted(outputs("fp8_block"))
    assert found["codes"] == values.numel()
    assert found["zero"] == int((values == 0).sum())
    assert found["saturated"] == int((values.abs() == 448).sum())


def test_scales_are_counted_by_their_power_of_two(outputs):
    scales = torch.cat([t.flatten() for t in tensors_of(outputs("mxfp4"), ".weight_scale")])
    exponents, numbers = (scales.int() - 127).unique(return_counts=True)
    found = counted(outputs("mxfp4"))
    assert found["scales_by_exponent"] == [
        list(pair) for pair in zip(exponents.tolist(), numbers.tolist(), strict=True)
    ]
    assert (found["scales"], found["zero_scales"], found["nan_scales"]) == (scales.numel(), 0, 0)


def test_zero_and_infinite_scales_and_nan_codes_are_counted():
    from moequant.formats import quantize

    q = quantize(torch.randn(128, 256), "fp8_block")
    q.qdata.view(torch.uint8)[0, :3] = 0x7F
    q.scale[0, 0], q.scale[0, 1] = 0.0, torch.inf
    found = codes._count(q)
    assert (found.nan, found.scales, found.zero_scales, found.nan_scales) == (3, 2, 1, 1)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block", "mxfp4", "w4a8", "fp8_channel", "mxfp8"])
def test_of_many_weights_evenly_spread_ones_and_rows_are_counted(outputs, monkeypatch, format):
    whole = counted(outputs(format))
    monkeypatch.setattr(codes, "MOST_WEIGHTS", 12)
    monkeypatch.setattr(codes, "MOST_BYTES", 1 << 18)
    monkeypatch.setattr(codes, "_MOST_ELEMENTS", 1 << 14)
    part = counted(outputs(format))
    assert part["weights"] == 24
    assert 0 < part["counted"] <= 12
    assert 0 < part["codes"] <= whole["codes"] // 2
    # Weights are alike, so that shares of a part are those of the whole.
    for kind in ("zero", "saturated"):
        share = whole[kind] / whole["codes"]
        assert part[kind] / part["codes"] == pytest.approx(share, rel=0.1, abs=1e-3)
