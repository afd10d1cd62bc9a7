"""Words of codes: compiled for a CPU as by tables."""

from __future__ import annotations

import pytest
import torch

from moequant.kernels.sm90 import panel_words
from moequant.kernels.sm90.panels import CODE_BYTES
from moequant.kernels.sm90_w4a8 import int4_layout, mxfp4_layout
from moequant.kernels.sm90_w4a16 import layout as w4a16_layout
from moequant.native_code import UnavailableError, jit

every_family = pytest.mark.parametrize(
    "words",
    [w4a16_layout._WORDS, int4_layout._WORDS, mxfp4_layout.WORDS],
    ids=["w4a16", "int4", "mxfp4"],
)
BYTES = [(half, which) for half in range(2) for which in range(2)]


def random_codes(P, blocks):
    g = torch.Generator().manual_seed(P)
    return torch.randint(0, 256, (P, 2, 4, 4, 2, 2, blocks * 64), dtype=torch.uint8, generator=g)


def packed(words, codes, panel_bytes=CODE_BYTES + 256):
    P, *_, row_bytes = codes.shape
    to = torch.full((P, row_bytes // 64, panel_bytes), 0xA5, dtype=torch.uint8)
    words.pack(codes, to)
    return to


@every_family
def test_a_word_is_linear_in_the_bits_of_its_bytes_and_keeps_all_of_them(words):
    byte = panel_words.every_byte(torch.device("cpu"))
    tables = [words.bits(byte, *of) for of in BYTES]
    for table in tables:
        assert torch.equal(table[(byte[:, None] ^ byte).long()], table[:, None] ^ table)
    # Rows of the matrix over GF(2), by elimination.
    rows = [int(table[1 << bit]) & 0xFFFFFFFF for table in tables for bit in range(8)]
    rank = 0
    for bit in range(32):
        pivot = next((row for row in rows if row >> bit & 1), None)
        if pivot is not None:
            rank += 1
            rows.remove(pivot)
            rows = [row ^ pivot if row >> bit & 1 else row for row in rows]
    assert rank == 32


@every_family
@pytest.mark.parametrize(("P", "blocks"), [(1, 1), (3, 5)])
def test_compiled_and_tabulated_words_are_the_same(words, P, blocks, monkeypatch):
    assert panel_words._native(words) is not None
    codes = random_codes(P, blocks)
    compiled = packed(words, codes)
    monkeypatch.setattr(panel_words, "_native", lambda words: None)
    assert torch.equal(packed(words, codes), compiled)
    assert (compiled[..., CODE_BYTES:] == 0xA5).all()  # where scales will be


@every_family
def test_where_llvm_compiles_nothing_tables_are_used(words, monkeypatch):
    codes = random_codes(2, 2)
    compiled = packed(words, codes)

    def refuse(function):
        raise UnavailableError("no LLVM on this machine")

    monkeypatch.setattr(jit, "compile_function", refuse)
    panel_words._native.cache_clear()
    try:
        assert torch.equal(packed(words, codes), compiled)
    finally:
        panel_words._native.cache_clear()
