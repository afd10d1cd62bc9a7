"""Converted checkpoints, clean and faulty, and a reader of pages that checks them as it reads."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from moequant import convert
from moequant.reporting import make_report
from moequant.storage.headers import read_header

VOID = {"meta", "br", "link", "img", "hr", "input"}


@pytest.fixture(scope="session")
def reported_source(make_checkpoint):
    """A small Qwen3-MoE checkpoint; not to be changed."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def outputs(reported_source, tmp_path_factory):
    """outputs(format) -> a converted checkpoint; not to be changed."""
    made = {}

    def make(format="nvfp4"):
        if format not in made:
            made[format] = tmp_path_factory.mktemp("reported") / format
            convert(reported_source, made[format], format=format)
        return made[format]

    return make


@pytest.fixture(scope="session")
def report_of(reported_source, outputs):
    """The report of a verified NVFP4 checkpoint; its document is not to be changed."""
    return make_report([outputs()], against=reported_source)


def overwrite(folder, name, change):
    """Change the bytes of a tensor where they lie."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"][name]
    info = read_header(folder / file, file)[name]
    with (folder / file).open("r+b") as opened:
        opened.seek(info.start)
        data = bytearray(opened.read(info.size_bytes))
        opened.seek(info.start)
        opened.write(change(data))


FLIPPED = "model.layers.1.mlp.experts.2.up_proj.weight_packed"
WRONG = "model.layers.0.mlp.experts.3.down_proj.weight_packed"


@pytest.fixture(scope="session")
def faulty(outputs, tmp_path_factory):
    """A copy with one flipped bit in FLIPPED, and another tensor's codes in WRONG."""
    folder = shutil.copytree(outputs(), tmp_path_factory.mktemp("faulty") / "faulty")

    def flip(data):
        data[100] ^= 1
        return data

    overwrite(folder, FLIPPED, flip)
    overwrite(folder, WRONG, lambda data: data[::-1])
    return folder


class Page(HTMLParser):
    """A parsed page; refuses what is not well-formed or refers to anything outside.

    Attributes:
        text: all text but that of the style.
        tables: by caption, the rows as lists of cells.
        tags: every element as its name and attributes.
    """

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.text, self.tables, self.tags = "", {}, []
        self._open, self._caption, self._rows, self._cell = [], None, [], None
        assert html.startswith("<!DOCTYPE html>\n")
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        self.tags.append((tag, dict(attributes)))
        self._check_is_self_contained(tag, dict(attributes))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = ""

    @staticmethod
    def _check_is_self_contained(tag, attributes):
        assert tag not in ("script", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "srcset", "action", "data", "poster", "background", "style"):
                pytest.fail(f"{tag} has {name}")
            if name in ("href", "xlink:href"):
                assert value.startswith("data:image/png;base64," if tag == "image" else "#"), value

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag
        if tag in ("td", "th"):
            self._rows[-1].append(self._cell)
            self._cell = None
        elif tag == "table":
            self.tables.setdefault(self._caption, []).extend(self._rows)

    def handle_data(self, data):
        if self._open and self._open[-1] == "style":
            assert not re.search(r"url\(|@import|expression", data)
            return
        self.text += data
        if self._cell is not None:
            self._cell += data
        elif self._open and self._open[-1] == "caption":
            self._caption += data

    def rows(self, caption):
        """The rows of a table, without its head, by their first cell."""
        return {row[0]: row[1:] for row in self.tables[caption][1:]}


@pytest.fixture(scope="session")
def read_page():
    """read_page(html) -> a Page."""
    return Page
