from __future__ import annotations

import pytest

from moequant.cli.tables import table_lines

COLUMNS = ["name", ">count", "what it is"]
ROWS = [
    ("compressed-tensors", "6", "vLLM, and in part SGLang; what llm-compressor writes"),
    ("fp8", "12", "a/path/that/is/one/word"),
]


def lines(width, columns=COLUMNS, rows=ROWS):
    return list(table_lines(columns, rows, width))


def test_a_table_that_fits_has_a_line_a_row():
    assert lines(None) == lines(200)
    assert lines(None) == [
        "name                 count   what it is",
        "compressed-tensors       6   vLLM, and in part SGLang; what llm-compressor writes",
        "fp8                     12   a/path/that/is/one/word",
    ]


def test_a_narrow_table_folds_between_words_within_its_column():
    assert lines(60) == [
        "name                 count   what it is",
        "compressed-tensors       6   vLLM, and in part SGLang; what",
        "                             llm-compressor writes",
        "fp8                     12   a/path/that/is/one/word",
    ]


def test_a_heading_of_numbers_folds_and_the_numbers_do_not():
    assert lines(14, ["n", ">H, I multiples of"], [("a", "1.0 MB"), ("b", "2 B")]) == [
        "n         H, I",
        "     multiples",
        "            of",
        "a       1.0 MB",
        "b          2 B",
    ]


@pytest.mark.parametrize("width", range(1, 90))
def test_no_word_is_split_and_no_line_is_wider_unless_a_word_is(width):
    words = {word for row in (*ROWS, [c.removeprefix(">") for c in COLUMNS]) for c in row
             for word in c.split()}  # fmt: skip
    table = lines(width)
    assert {word for line in table for word in line.split()} == words
    # The longest words of the columns beside each other: 18 + 3 + 5 + 3 + 23.
    if width >= 52:
        assert max(map(len, table)) <= width


def test_where_words_do_not_fit_beside_each_other_a_row_is_a_block_of_lines():
    assert lines(51)[:4] == [
        "name         compressed-tensors",
        "count        6",
        "what it is   vLLM, and in part SGLang; what llm-compressor writes",
        "",
    ]


def test_a_table_without_rows_has_its_head():
    assert lines(80, rows=[]) == ["name   count   what it is"]
