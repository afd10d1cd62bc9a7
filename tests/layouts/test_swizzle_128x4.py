import ast
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_module import load_module

from moequant.act_fn import SILU
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, quantize
from moequant.layouts.swizzle_128x4 import swizzle, swizzled_shape, unswizzle
from moequant.runtime import ExpertWeights
from moequant.runtime.backends import REGISTRY

SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
BYTE_SCALED = [f for f in CONVERTIBLE.values() if f.scale_dtype.itemsize == 1]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def offset(r: int, c: int, cols: int) -> int:
    """cuBLAS: tiles of 128x4 row-major, (outer % 32) * 16 + (outer / 32) * 4 + inner within one."""
    tiles_per_row = (cols + 3) // 4
    tile = (r // 128) * tiles_per_row + c // 4
    outer, inner = r % 128, c % 4
    return tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + inner


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        ((0, 0), 0),
        ((0, 3), 3),
        ((1, 0), 16),
        ((31, 0), 496),
        ((32, 0), 4),
        ((96, 2), 14),
        ((127, 3), 511),
        ((0, 4), 512),
        ((128, 0), 1024),  # second row of tiles, after two tiles of the first
        ((200, 7), 1024 + 512 + 8 * 16 + 2 * 4 + 3),  # 200 = 128 + 2 * 32 + 8
    ],
)
def test_hand_computed_positions(position, expected):
    scale = torch.zeros(256, 8, dtype=torch.uint8)
    scale[position] = 1
    assert swizzle(scale).flatten().nonzero().tolist() == [[expected]]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 4), (129, 4), (40, 9), (256, 12)])
def test_every_byte_lies_where_the_formula_says(shape):
    rows, cols = shape
    scale = random_bytes(rows, cols)
    padded_rows, padded_cols = swizzled_shape(rows, cols)
    expected = [0] * (padded_rows * padded_cols)
    for r in range(rows):
        for c in range(cols):
            expected[offset(r, c, cols)] = scale[r, c].item()
    swizzled = swizzle(scale)
    assert swizzled.shape == (padded_rows, padded_cols)
    assert swizzled.flatten().tolist() == expected


@pytest.fixture(scope="module")
def vendored():
    """A second implementation that is installed anyway; its package wants CUDA, this file not."""
    source = Path(torch.__file__).parent / "_vendor/quack/mx_utils.py"
    if not source.exists():
        pytest.skip(f"torch {torch.__version__} does not vendor quack's mx_utils")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, from torch.compile
        return load_module(source)


@pytest.mark.parametrize("shape", [(128, 4), (130, 7), (384, 64), (768, 33)])
def test_equals_the_form_torch_vendors_for_cublas(shape, vendored):
    scale = random_bytes(*shape)
    assert torch.equal(swizzle(scale).flatten(), vendored.to_blocked(scale))


@pytest.fixture(scope="module")
def torchao():
    """`to_blocked` and `from_blocked` of torchao, whose import would take seconds, and warns.

    `make` puts it beside the packages: transformers would import it.
    """
    source = Path(sys.prefix) / "sources/torchao/prototype/mx_formats/utils.py"
    if not source.exists():
        pytest.skip("needs torchao where the Makefile puts it")
    wanted = ("ceil_div", "to_blocked", "from_blocked")
    module = ast.parse(source.read_text())
    module.body = [node for node in module.body if getattr(node, "name", None) in wanted]
    made = {"torch": torch, "Tensor": torch.Tensor}
    exec(compile(module, source, "exec"), made)  # noqa: S102
    return SimpleNamespace(**{name: made[name] for name in wanted})


@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 4), (130, 7), (384, 64), (768, 33), (1536, 128), (2880, 90)]
)
@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
def test_equals_to_blocked_of_torchao(shape, dtype, torchao):
    scale = random_bytes(*shape)
    swizzled = swizzle(scale.view(dtype)).view(torch.uint8)
    assert torch.equal(swizzled.flatten(), torchao.to_blocked(scale))
    assert torch.equal(torchao.from_blocked(swizzled.flatten(), *shape), scale)


@pytest.mark.parametrize(("format", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_each_expert_of_a_prepared_layer_is_to_blocked_of_torchao(format, group, torchao):
    E, H, I = 3, 160, 96
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    parts = {n: quantize(torch.randn(s, generator=g), format) for n, s in shapes.items()}
    layout = REGISTRY["cutlass_fp4"].layout
    assert layout.name == "stacked_tiles"
    packed = layout.pack(ExpertWeights.of(parts, SILU))
    rows = {"w13": ("gate", "up"), "w2": ("down",)}
    for weight, names in rows.items():
        scale = torch.cat([parts[n].scale.view(torch.uint8) for n in names], 1)
        assert scale.shape[2] == parts[names[0]].shape[2] // group
        for e in range(E):
            found = packed[f"{weight}_scale"][e].view(torch.uint8).flatten()
            assert torch.equal(found, torchao.to_blocked(scale[e]))


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    rows=st.integers(0, 300),
    cols=st.integers(0, 20),
    dtype=st.sampled_from(SCALE_DTYPES),
)
def test_unswizzle_inverts_swizzle_bit_for_bit(lead, rows, cols, dtype):
    scale = random_bytes(*lead, rows, cols).view(dtype)
    swizzled = swizzle(scale)
    assert swizzled.shape == (*lead, *swizzled_shape(rows, cols))
    assert swizzled.dtype == dtype
    assert swizzled.is_contiguous()
    restored = unswizzle(swizzled, rows, cols)
    assert restored.dtype == dtype
    assert restored.is_contiguous()
    assert torch.equal(restored.view(torch.uint8), scale.view(torch.uint8))


@given(rows=st.integers(0, 1000), cols=st.integers(0, 1000))
def test_swizzled_shape_is_the_least_whole_number_of_tiles(rows, cols):
    padded_rows, padded_cols = swizzled_shape(rows, cols)
    assert padded_rows % 128 == padded_cols % 4 == 0
    assert 0 <= padded_rows - rows < 128
    assert 0 <= padded_cols - cols < 4


def test_each_matrix_of_a_batch_is_swizzled_by_itself():
    scale = random_bytes(2, 3, 130, 6)
    swizzled = swizzle(scale)
    for i in range(2):
        for j in range(3):
            assert torch.equal(swizzled[i, j], swizzle(scale[i, j]))


def test_whole_tiles_are_a_permutation_of_the_bytes():
    scale = random_bytes(256, 16)
    assert torch.equal(swizzle(scale).flatten().sort().values, scale.flatten().sort().values)


def test_a_view_that_is_not_contiguous_gives_the_same_bytes():
    scale = random_bytes(6, 140)
    assert torch.equal(swizzle(scale.mT), swizzle(scale.mT.contiguous()))
    swizzled = swizzle(scale.mT)
    strided = torch.stack([swizzled, swizzled], dim=-1)[..., 0]
    assert torch.equal(unswizzle(strided, 140, 6), scale.mT)


def test_scales_at_an_odd_byte_of_a_buffer_give_the_same_bytes():
    scale = random_bytes(513)[1:].view(128, 4)
    plain = torch.tensor(scale.tolist(), dtype=torch.uint8)
    assert torch.equal(swizzle(scale), swizzle(plain))
    assert torch.equal(unswizzle(scale, 128, 4), unswizzle(plain, 128, 4))


@pytest.mark.parametrize("fmt", BYTE_SCALED, ids=lambda f: f.name)
def test_scales_of_a_format_come_back(fmt):
    K = 2 * max(64, fmt.block[1])
    w = torch.randn(2, 136, K, generator=torch.Generator().manual_seed(1))
    scale = fmt.quantize(w).scale
    rows, cols = scale.shape[-2:]
    restored = unswizzle(swizzle(scale), rows, cols)
    assert torch.equal(restored.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("position", [(130, 0), (0, 6), (255, 7)])
def test_unswizzle_refuses_padding_that_is_not_zero(position):
    padded = torch.zeros(256, 8, dtype=torch.uint8)
    padded[position] = 1
    with pytest.raises(CheckpointError, match=r"w2\.scale: a padding byte .* prepare"):
        unswizzle(swizzle(padded), 130, 6, name="w2.scale")


def test_unswizzle_refuses_scales_of_another_shape():
    with pytest.raises(CheckpointError, match=r"\[128, 4\], but \[129, 4\] make \[256, 4\]"):
        unswizzle(swizzle(random_bytes(128, 4)), 129, 4)
    with pytest.raises(UnsupportedError, match=r"w2 is \[512\], but must be \[..., 128, 4\]"):
        unswizzle(swizzle(random_bytes(128, 4)).flatten(), 128, 4, name="w2")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: swizzle([[1]]), r"scale is list, but must be a tensor \[\.\.\., R, C\]"),
        (lambda: swizzle(random_bytes(4)), r"scale is \[4\], but must be \[\.\.\., R, C\]"),
        (
            lambda: unswizzle(None, 128, 4),
            r"scale is NoneType, but must be a tensor \[..., 128, 4\]",
        ),
        (lambda: unswizzle(random_bytes(128, 4), 2.5, 4), r"rows is 2\.5, but must be a whole"),
        (
            lambda: unswizzle(random_bytes(128, 4), 128, -1),
            r"cols is -1, but must be .* at least 0",
        ),
    ],
)
def test_arguments_of_other_types_and_ranks_are_refused(call, said):
    with pytest.raises(UnsupportedError, match=said):
        call()


def test_wide_scales_are_refused():
    with pytest.raises(UnsupportedError, match=r"one-byte scales, not torch\.float32"):
        swizzle(torch.ones(128, 4))
    with pytest.raises(UnsupportedError, match=r"one-byte scales, not torch\.float32"):
        unswizzle(torch.ones(128, 4), 128, 4)
