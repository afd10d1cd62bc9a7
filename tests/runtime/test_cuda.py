"""The same numbers on a CUDA device; the suite skips these where there is none."""

from __future__ import annotations

import pytest
import torch

from moequant.conversion import convert
from moequant.formats import CONVERTIBLE, dequantize
from moequant.runtime import load_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weight():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(256, 512, generator=generator) * 0.02
    w[:128] *= torch.exp2(torch.randint(-20, 20, (128, 1), generator=generator).float())
    w[:, 128:256] = 0
    return w.bfloat16()


def bytes_of(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_device_quantizes_to_the_same_bytes(format):
    w = weight()
    for choice in zip(*CONVERTIBLE[format].options.values(), strict=False):
        options = dict(zip(CONVERTIBLE[format].options, choice, strict=True))
        weighted = options.get("search") == "weighted"
        square = torch.rand(512, generator=torch.Generator().manual_seed(1)) if weighted else None
        here, there = (
            CONVERTIBLE[format].quantize(one, options, mean_square=square) for one in (w, w.cuda())
        )
        for part, tensor in here.tensors().items():
            assert torch.equal(bytes_of(there.tensors()[part]), bytes_of(tensor)), (options, part)
        assert torch.equal(dequantize(there).cpu(), dequantize(here))


@pytest.mark.parametrize("activations", ["format", "none"])
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_the_reference_runs_on_a_device_when_it_is_named(
    make_checkpoint, tmp_path, format, activations
):
    path = convert(make_checkpoint(), tmp_path / "out", format=format).output
    assert load_experts(path, 0, device="cuda").chosen_backend() != "torch_reference"
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 256, generator=generator)
    ids = torch.randint(-1, 4, (9, 2), generator=generator)
    weights = torch.rand(9, 2, generator=generator)
    here = load_experts(path, 0, activations=activations)(hidden, weights, ids)
    experts = load_experts(
        path, 0, device="cuda", backend="torch_reference", activations=activations
    )
    there = experts(hidden.cuda(), weights.cuda(), ids.cuda()).cpu()
    # Without quantized activations only float32 accumulation in another order differs: sums of 256
    # terms. With them, a last bit of an intermediate may decide between two FP8 neighbours.
    limit = 1e-5 if activations == "none" else 1e-2
    assert (there - here).norm() <= limit * here.norm()
