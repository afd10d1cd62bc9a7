"""Every text is escaped, and only what is HTML already is not."""

from __future__ import annotations

from moequant.reporting.markup import Markup, code, element, join, table
from moequant.reporting.words import listed, percent, seconds


def test_texts_and_attributes_are_escaped_and_html_is_not():
    inner = element("b", "a<b")
    assert inner == "<b>a&lt;b</b>"
    assert element("p", inner, "&", title='"x"', class_="c", id=None) == (
        '<p title="&quot;x&quot;" class="c"><b>a&lt;b</b>&amp;</p>'
    )
    assert isinstance(join("a", [inner, "<"]), Markup)
    assert join("a", [inner, "<"]) == "a<b>a&lt;b</b>&lt;"


def test_control_characters_are_shown_by_their_codes():
    assert element("p", "a\x00b\u202ec\nd") == "<p>a\\x00b\\u202ec\nd</p>"


def test_void_elements_are_not_closed():
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_the_first_cell_of_a_row_is_its_header():
    shown = table(["a", ">n"], [("x<", "1")], caption="c")
    assert '<th scope="row">x&lt;</th><td class="number">1</td>' in shown
    assert "<caption>c</caption>" in shown
    assert '<th scope="col" class="number">n</th>' in shown


def test_long_names_are_cut():
    assert len(code("n" * 10_000)) < 500


def test_numbers_are_words_with_three_digits():
    values = [None, 0.0, 1.3e-7, 0.00312, 0.0952, 0.317, 1, 1.444]
    assert [percent(value) for value in values] == [
        "-", "0 %", "1.3e-05 %", "0.312 %", "9.52 %", "31.7 %", "100 %", "144.4 %",
    ]  # fmt: skip
    assert [seconds(value) for value in (3.14, 41, 720, 11160)] == [
        "3.1 s",
        "41 s",
        "12 min",
        "3.1 h",
    ]
    assert [listed(words) for words in ([], ["a"], ["a", "b", "c"])] == ["", "a", "a, b and c"]
