import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations import deepgemm

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.layouts.deepgemm_scale import (
    mn_major_view,
    pack_ue8m0,
    packed_shape,
    unpack_ue8m0,
)

EXPONENT_SCALED = [
    f
    for f in CONVERTIBLE.values()
    # A scale of a whole row is none of a block of columns.
    if f.scale_dtype in (torch.float32, torch.float8_e8m0fnu) and f.block[1] <= 128
]


def random_codes(*shape: int) -> torch.Tensor:
    """Exponent bytes, 255 (NaN) left out."""
    return torch.randint(
        0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def as_dtype(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    e8m0 = codes.view(torch.float8_e8m0fnu)
    return e8m0.float() if dtype == torch.float32 else e8m0.view(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.flatten().equal(b.flatten())


def test_hand_computed_words():
    # 2**0 and 2**-1 have bytes 0x7f and 0x7e; K holds 5 scales, so a second int32 holds one.
    scale = torch.tensor([[1.0, 0.5, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0, 2.0**-126]])
    storage = pack_ue8m0(scale, 3, block_n=2)
    # Byte 3 of the first word is 0x81: beyond the sign bit of int32.
    first, second = 0x81807E7F - 2**32, 0x7F7F7F7F
    assert storage.tolist() == [[first, first, second, 0], [0x82, 0x82, 0x01, 0]]


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 3),
    rows=st.integers(0, 300),
    cols=st.integers(1, 9),
    block_n=st.sampled_from((1, 2, 128)),
    dtype=st.sampled_from((torch.float32, torch.float8_e8m0fnu, torch.uint8)),
)
def test_packed_words_are_the_formula_and_their_inverse_is_exact(
    experts, rows, cols, block_n, dtype
):
    codes = random_codes(experts, -(-rows // block_n), cols)
    scale = as_dtype(codes, dtype)
    storage = pack_ue8m0(scale, rows, block_n=block_n)
    assert storage.dtype == torch.int32
    assert storage.is_contiguous()
    assert storage.shape == (experts, *packed_shape(rows, cols))

    words, rows_stored = storage.shape[-2:]
    codes_of = codes.tolist()
    expected = [
        [
            [
                sum(
                    codes_of[e][r // block_n][4 * j + i] << 8 * i
                    for i in range(4)
                    if r < rows and 4 * j + i < cols
                )
                for r in range(rows_stored)
            ]
            for j in range(words)
        ]
        for e in range(experts)
    ]
    assert (storage.long() & 0xFFFFFFFF).tolist() == expected

    restored = unpack_ue8m0(storage, rows, cols, block_n=block_n, dtype=dtype)
    assert restored.is_contiguous()
    assert torch.equal(restored.view(torch.uint8), scale.view(torch.uint8))
    assert restored.dtype == dtype


@pytest.mark.parametrize(("experts", "rows"), [(1, 256), (3, 256), (2, 130), (2, 3)])
def test_views_pass_the_checks_of_deepgemm(experts, rows):
    # csrc/utils/layout.hpp, check_sf_layout with tma_stride_check; a TMA address is 16-byte.
    packed = pack_ue8m0(random_codes(experts, rows, 6), rows, block_n=1)
    view = mn_major_view(packed, rows)
    assert view.shape == (experts, rows, 2)
    assert view.stride(-2) == 1
    assert view.stride(-1) == -(-rows // 4) * 4
    assert view.stride(-3) == view.stride(-1) * view.shape[-1]
    assert view.data_ptr() == packed.data_ptr()
    assert view.stride(-1) * view.element_size() % 16 == 0


@pytest.mark.parametrize("block_n", [1, 128])
def test_packing_equals_what_transformers_hands_to_deepgemm(block_n):
    # Its code takes K in whole words and N in whole blocks.
    rows, cols = 384, 8
    scale = random_codes(3, rows // block_n, cols).view(torch.float8_e8m0fnu)
    theirs = deepgemm._coerce_sf_for_kernel(scale, is_sm100=True, expected_mn=rows)
    ours = mn_major_view(pack_ue8m0(scale, rows, block_n=block_n), rows)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_experts_are_packed_each_by_itself():
    codes = random_codes(2, 3, 10, 5)
    packed = pack_ue8m0(codes, 10, block_n=1)
    for i in range(2):
        for j in range(3):
            assert torch.equal(packed[i, j], pack_ue8m0(codes[i, j], 10, block_n=1))


@pytest.mark.parametrize(
    "view",
    [
        random_codes(8, 12).mT,
        random_codes(33)[1:].view(4, 8),  # at an odd byte of its buffer
        random_codes(8, 2)[:, :1].mT,  # one row, whose stride torch does not count
    ],
    ids=["transposed", "odd", "one_row"],
)
def test_scales_that_are_views_give_the_same_words(view):
    plain = torch.tensor(view.tolist(), dtype=torch.uint8)
    rows = view.shape[0]
    assert torch.equal(pack_ue8m0(view, rows, block_n=1), pack_ue8m0(plain, rows, block_n=1))


def test_every_exponent_byte_survives_float32():
    codes = torch.arange(255, dtype=torch.int32).to(torch.uint8)[None]
    from_float = pack_ue8m0(codes.view(torch.float8_e8m0fnu).float(), 1, block_n=1)
    assert torch.equal(from_float, pack_ue8m0(codes, 1, block_n=1))


@pytest.mark.parametrize("fmt", EXPONENT_SCALED, ids=lambda f: f.name)
def test_scales_of_a_format_come_back(fmt):
    rows = 200
    w = torch.randn(2, rows, 6 * fmt.block[1], generator=torch.Generator().manual_seed(1))
    scale = fmt.quantize(w).scale
    block_n = fmt.block[0]
    packed = pack_ue8m0(scale, rows, block_n=block_n)
    restored = unpack_ue8m0(packed, rows, scale.shape[-1], block_n=block_n, dtype=scale.dtype)
    assert torch.equal(restored.view(torch.uint8), scale.view(torch.uint8))


def test_free_float_scales_are_refused_and_told_the_option():
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    scale = CONVERTIBLE["fp8_block"].quantize(w, {"scale": "float32"}).scale
    with pytest.raises(
        UnsupportedError, match='convert the checkpoint with scale = "power_of_two"'
    ):
        pack_ue8m0(scale, 128, block_n=128)


@pytest.mark.parametrize("value", [3.0, 0.0, -2.0, 2.0**-128, math.inf, math.nan, 1 + 2**-23])
def test_pack_refuses_a_scale_that_is_no_power_of_two(value):
    scale = torch.ones(2, 3, 5)
    scale[1, 2, 4] = value
    with pytest.raises(UnsupportedError, match=r'e5: .* at index \[1, 2, 4\] .*power_of_two"'):
        pack_ue8m0(scale, 384, block_n=128, name="e5")


def test_pack_refuses_scales_of_another_block_size():
    with pytest.raises(CheckpointError, match="3 scale rows, but 384 weight rows in blocks of 1"):
        pack_ue8m0(torch.ones(3, 5), 384, block_n=1)


def test_other_dtypes_are_refused():
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        pack_ue8m0(torch.ones(4, 4).to(torch.float8_e4m3fn), 4, block_n=1)
    storage = pack_ue8m0(random_codes(4, 4), 4, block_n=1)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        unpack_ue8m0(storage, 4, 4, block_n=1, dtype=torch.bfloat16)


def test_unpack_refuses_rows_of_a_block_that_differ():
    storage = pack_ue8m0(torch.ones(2, 4), 256, block_n=128)
    storage[0, 130] += 1
    with pytest.raises(CheckpointError, match="row 130 has other scales than row 128"):
        unpack_ue8m0(storage, 256, 4, block_n=128, dtype=torch.float32)


def test_padding_that_is_not_zero_is_refused():
    rows_padded = pack_ue8m0(random_codes(3, 4), 3, block_n=1)
    rows_padded[0, 3] = 1
    with pytest.raises(CheckpointError, match="w13: padding"):
        unpack_ue8m0(rows_padded, 3, 4, block_n=1, dtype=torch.uint8, name="w13")
    word_padded = pack_ue8m0(random_codes(4, 6), 4, block_n=1)
    word_padded[1, 0] |= 1 << 24
    with pytest.raises(CheckpointError, match="w13: padding"):
        unpack_ue8m0(word_padded, 4, 6, block_n=1, dtype=torch.uint8, name="w13")


def test_storage_of_another_shape_is_refused():
    storage = pack_ue8m0(random_codes(8, 4), 8, block_n=1)
    with pytest.raises(CheckpointError, match=r"int32 \[1, 8\], but 12 rows need .* \[1, 12\]"):
        unpack_ue8m0(storage, 12, 4, block_n=1, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"int32 \[1, 8\], but 8 rows need .* \[2, 8\]"):
        unpack_ue8m0(storage, 8, 5, block_n=1, dtype=torch.uint8)


def test_storage_of_another_dtype_is_refused():
    storage = pack_ue8m0(random_codes(8, 4), 8, block_n=1)
    with pytest.raises(CheckpointError, match=r"float32 \[1, 8\], but 8 rows need torch\.int32"):
        unpack_ue8m0(storage.view(torch.float32), 8, 4, block_n=1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pack_ue8m0([1.0], 1, block_n=1, name="w2"), r"w2 is list, but must be a tensor"),
        (
            lambda: pack_ue8m0(torch.ones(4), 4, block_n=1),
            r"scale is \[4\], but must be \[\.\.\., ",
        ),
        (lambda: pack_ue8m0(torch.ones(4, 4), 4, block_n=0), "block_n is 0, but .* at least 1"),
        (lambda: pack_ue8m0(torch.ones(4, 4), "4", block_n=1), "rows is '4', but must be a whole"),
        (
            lambda: unpack_ue8m0(torch.ones(4), 4, 4, block_n=1, dtype=torch.uint8),
            r"scale is \[4\], but must be",
        ),
        (lambda: mn_major_view(5, 4), "storage is int, but must be a tensor"),
        (
            lambda: mn_major_view(torch.zeros(4, dtype=torch.int32), 4),
            r"storage is \[4\], but must",
        ),
        (lambda: mn_major_view(torch.zeros(1, 8), 8), r"torch\.float32 \[1, 8\], but 8 rows need"),
    ],
)
def test_arguments_of_other_types_and_ranks_are_refused(call, said):
    with pytest.raises(UnsupportedError, match=said):
        call()


def test_a_view_of_more_rows_than_the_storage_has_is_refused():
    storage = pack_ue8m0(random_codes(7, 4), 7, block_n=1)
    assert mn_major_view(storage, 7).shape == (7, 1)
    said = r"storage is torch\.int32 \[1, 8\], but 9 rows need torch\.int32 \[\.\.\., columns, 12\]"
    with pytest.raises(UnsupportedError, match=said):
        mn_major_view(storage, 9)
