"""Experts that are packed together, as on a GPU, are what each is alone."""

from __future__ import annotations

import pytest
import torch

from moequant.benchmarks.layers import random_experts
from moequant.benchmarks.shapes import LayerShape
from moequant.kernels.sm90 import panels
from moequant.runtime.backends import REGISTRY
from moequant.runtime.packing import workload_of


@pytest.mark.parametrize(
    ("format", "backend", "activations", "hidden", "intermediate"),
    [  # the last panel of gate and up, or of down, is half full
        ("nvfp4", "sm90_w4a16", "format", 320, 96),
        ("mxfp4", "sm90_mxfp4_fp8", "fp8_token", 320, 96),
        ("w4a8", "sm90_w4a8", "format", 384, 128),
    ],
)
def test_experts_in_batches_are_packed_and_unpacked_as_one_by_one(
    monkeypatch, format, backend, activations, hidden, intermediate
):
    shape = LayerShape(5, hidden, intermediate, 2)
    weights = random_experts(shape, format, torch.device("cpu"))
    layout = REGISTRY[backend].layouts[0]
    one_by_one = layout.pack(weights)
    workload = workload_of(weights, activations)
    batches = []

    def two_each(packed):
        batches.append([slice(0, 2), slice(2, 4), slice(4, 6)])
        return batches[-1]

    monkeypatch.setattr(panels, "_batches", two_each)
    together = layout.pack(weights)
    assert {name: t.tolist() for name, t in together.items()} == {
        name: t.tolist() for name, t in one_by_one.items()
    }
    back = layout.unpack(together, workload)
    assert len(batches) == 4  # gate and up, down, and both back
    for projection, q in weights.projections().items():
        for part, tensor in q.tensors().items():
            assert torch.equal(
                back.projections()[projection].tensors()[part].view(torch.uint8),
                tensor.view(torch.uint8),
            ), (projection, part)


def test_batches_are_of_experts_and_as_large_as_the_device_should_have():
    packed = torch.empty(5, 3, 2, 1024, dtype=torch.uint8)
    assert list(panels._batches(packed)) == [slice(e, e + 1) for e in range(5)]
    assert list(panels._batches(packed[:0])) == []


def test_batches_hold_as_many_experts_as_fit(monkeypatch):
    packed = torch.empty(5, 3, 2, 1024, dtype=torch.uint8)
    monkeypatch.setitem(panels._BATCH_BYTES, "cpu", 2 * packed[0].nbytes + 1)
    assert list(panels._batches(packed)) == [slice(0, 2), slice(2, 4), slice(4, 6)]
