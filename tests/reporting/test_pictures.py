"""Pictures of a page are SVG files that need nothing else."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from moequant.reporting import make_report, pictures_of
from moequant.reporting.charts import value_bars
from moequant.reporting.heat_map import Scale, heat_map

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures(outputs, reported_source):
    return pictures_of(make_report([outputs()], against=reported_source).to_html())


def test_the_maps_of_errors_are_found_with_captions_that_say_their_colors(pictures):
    assert [p.name for p in pictures] == ["errors-gate-and-up", "errors-down"]
    for picture, words in zip(pictures, ("gate and up", "down"), strict=True):
        caption = rf"Error of {words} in nvfp4 by layer and expert, from \S+ % \(dark\) to .*"
        assert re.fullmatch(caption, picture.caption)


def test_each_is_a_document_with_light_colors_and_refers_to_nothing(pictures):
    for picture in pictures:
        root = ElementTree.fromstring(picture.svg)  # noqa: S314 - our own
        assert root.tag == f"{SVG}svg"
        (style,) = root.iter(f"{SVG}style")
        assert "--text: #17202b" in style.text
        assert "@media" not in style.text
        assert "url(" not in style.text
        (image,) = root.iter(f"{SVG}image")
        assert image.get("href").startswith("data:image/png;base64,")


def test_pictures_of_one_name_are_numbered_and_texts_stay_escaped():
    scale = Scale(low=0.0, high=1.0, show=str)
    maps = [heat_map(t, {0: [0.5]}, scale, picture="errors-down") for t in ("a <b> & c", "d")]
    bars = value_bars("KL", [("<x>", 1.0, None)], None, picture="kl-divergence")
    found = pictures_of("".join([*maps, bars]))
    assert [p.name for p in found] == ["errors-down", "errors-down-2", "kl-divergence"]
    assert found[0].caption == "a <b> & c"
    texts = [ElementTree.fromstring(p.svg) for p in found]  # noqa: S314 - our own
    assert texts[0].find(f"{SVG}title").text == "a <b> & c"
    assert "<x>" in [text.text for text in texts[2].iter(f"{SVG}text")]


def test_a_page_of_another_tool_has_none():
    assert pictures_of("<!doctype html><svg><title>x</title></svg>") == []
    assert pictures_of(heat_map("t", {0: [0.5]}, Scale(low=0.0, high=1.0, show=str))) == []
