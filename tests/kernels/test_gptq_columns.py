"""The kernel that rounds a block of columns, against operations of torch that fuse nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.formats.elements import E2M1, E4M3, INT4
from moequant.kernels import gptq_columns
from moequant.kernels.gptq_columns import MOST_COLUMNS, round_columns
from moequant.kernels.launch import INTERPRETED
from moequant.quantizers import column_rounding

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
every_element = pytest.mark.parametrize("element", [E2M1, E4M3, INT4], ids=lambda e: e.name)


def rounded(element, w, target, scale, feedback):
    """Codes and errors, column by column; each product is rounded before it is added."""
    target, errors = target.clone(), w.clone()
    codes = torch.empty(w.shape, dtype=torch.uint8)
    for k in range(len(w)):
        code = element.encode((target[k] / scale[k]).float())
        codes[k] = code.view(torch.uint8)
        decoded = element.decode(code).double() * scale[k]
        errors[k] = w[k] - decoded
        for later in range(k + 1, len(w)):
            product = feedback[later, k] * errors[k]
            target[later] = target[later] + product
    return codes, errors


def by_kernel(element, w, target, scale, feedback):
    codes = torch.full(w.shape, 0xEE, dtype=torch.uint8, device=DEVICE)
    errors = w.to(DEVICE, copy=True)
    round_columns(
        element.name, target.to(DEVICE), scale.to(DEVICE), codes, errors, feedback.to(DEVICE)
    )
    return codes.cpu(), errors.cpu()


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(element, w, target, scale, feedback):
    wanted, found = (by(element, w, target, scale, feedback) for by in (rounded, by_kernel))
    assert torch.equal(found[0], wanted[0])
    assert same_bits(found[1], wanted[1])
    return found


@every_element
@pytest.mark.parametrize(("B", "N"), [(MOST_COLUMNS, 11), (17, 8), (1, 1)])
def test_codes_and_errors_are_those_of_the_definition(element, B, N):
    g = torch.Generator().manual_seed(B)
    w = torch.randn(B, N, generator=g, dtype=torch.float64)
    scale = torch.rand(B, N, generator=g, dtype=torch.float64) / element.largest + 0.01
    w[:, N // 2] = 0.0
    target = w + torch.randn(B, N, generator=g, dtype=torch.float64) * 0.1
    target[:, N // 2] = -0.0
    # A view, of other strides than those of a [B, B] matrix.
    feedback = torch.randn(2 * B, 2 * B, generator=g, dtype=torch.float64).T[:B, B:] / 4
    check(element, w, target, scale, feedback)


@every_element
def test_ties_go_to_even_signs_stay_and_what_is_too_large_saturates(element):
    largest, step = element.largest, float(element.half_step(torch.tensor(0.0))) * 2
    row = [0.0, -0.0, step / 2, -step / 2, step * 1.5, -step * 1.5, 1e30, -1e30, largest, -largest]
    target = torch.tensor([row, [x / 3 for x in row]], dtype=torch.float64)
    one = torch.ones_like(target)
    codes, errors = check(
        element, torch.zeros_like(target), target, one, torch.zeros(2, 2).double()
    )
    decoded = element.decode(codes.view(element.dtype)).double()
    assert torch.equal(errors, -decoded)
    assert decoded[0].tolist() == [
        *(0.0, 0.0, 0.0, 0.0, 2 * step, -2 * step),
        *(largest, element.lowest, largest, max(-largest, element.lowest)),
    ]  # fmt: skip
    keeps_sign = element is not INT4
    assert torch.equal(decoded[0].signbit()[1:4:2], torch.tensor([keeps_sign, keeps_sign]))


def test_a_row_depends_on_no_other():
    g = torch.Generator().manual_seed(3)
    w, scale = torch.randn(8, 10, generator=g).double(), torch.full((8, 10), 0.3).double()
    feedback = torch.randn(8, 8, generator=g).double()
    codes, _ = by_kernel(E2M1, w, w, scale, feedback)
    w[:, 4] = 100.0
    other, _ = by_kernel(E2M1, w, w, scale, feedback)
    assert (codes != other).any(0).nonzero().tolist() == [[4]]


def test_nothing_is_launched_for_no_rows(monkeypatch):
    def launched(*_, **__):
        pytest.fail("a kernel was launched")

    monkeypatch.setattr(gptq_columns, "launch", launched)
    none = torch.zeros(4, 0, dtype=torch.float64)
    codes = torch.zeros(4, 0, dtype=torch.uint8)
    round_columns("e2m1", none, none, codes, none, torch.zeros(4, 4, dtype=torch.float64))


def test_a_block_of_gptq_is_one_of_the_kernel():
    assert column_rounding.COLUMNS == MOST_COLUMNS


def test_it_compiles_without_a_device(compiled_by):
    found = compiled_by("compile_gptq_columns.py", "80")
    assert [one["ELEMENT"] for one in found] == ["e2m1", "e4m3", "int4"]
    # What any GPU has without asking for more.
    assert all(one["shared"] <= 48 << 10 for one in found)
