"""Words of codes: compiled for a CPU as by tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moequant.errors import SlowPathWarning
from moequant.kernels.sm90 import panel_words
from moequant.kernels.sm90.panel_words import CODE_BYTES
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
    byte = panel_words.every_byte()
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
def test_compiled_words_are_those_of_tables(words, P, blocks):
    assert words._native() is not None
    codes = random_codes(P, blocks)
    compiled = packed(words, codes)
    by_tables = torch.full_like(compiled, 0xA5)
    words.pack_by_tables(codes, by_tables)
    assert torch.equal(compiled, by_tables)
    assert (compiled[..., CODE_BYTES:] == 0xA5).all()  # where scales will be


@pytest.fixture
def anew():
    """Nothing is compiled yet, nor is afterwards what a test made of it."""
    panel_words._compiled.cache_clear()
    yield
    panel_words._compiled.cache_clear()


def refused(function):
    raise UnavailableError("no LLVM on this machine")


def wrong(function):
    return lambda codes, packed, *sizes: 0


@every_family
@pytest.mark.parametrize(
    ("compiler", "why"), [(refused, "no LLVM on this machine"), (wrong, "other words than torch")]
)
def test_where_llvm_is_of_no_use_tables_are_used_with_a_warning(
    words, compiler, why, anew, monkeypatch
):
    codes = random_codes(2, 2)
    by_tables = torch.full((2, 2, CODE_BYTES + 256), 0xA5, dtype=torch.uint8)
    words.pack_by_tables(codes, by_tables)
    monkeypatch.setattr(jit, "compile_function", compiler)
    with pytest.warns(SlowPathWarning, match=why):
        assert torch.equal(packed(words, codes), by_tables)


@every_family
def test_threads_that_begin_at_once_compile_once(words, anew, monkeypatch):
    compiled, compile_function = [], jit.compile_function

    def counted(function):
        compiled.append(function)
        return compile_function(function)

    monkeypatch.setattr(jit, "compile_function", counted)
    codes = random_codes(1, 1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: packed(words, codes), range(8)))
    assert len(compiled) == 1
    assert all(torch.equal(one, found[0]) for one in found)


@every_family
def test_the_default_device_does_not_matter(words, anew):
    codes = random_codes(1, 1)
    with torch.device("meta"):
        assert words._native() is not None
    by_tables = torch.empty(1, 1, CODE_BYTES, dtype=torch.uint8)
    words.pack_by_tables(codes, by_tables)
    assert torch.equal(packed(words, codes, CODE_BYTES), by_tables)
