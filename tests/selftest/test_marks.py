"""Backends for Blackwell are marked until a report from such a GPU lies in docs/selftest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moequant.compatibility.kernels import all_kernels
from moequant.runtime.activations import SCHEMES
from moequant.runtime.backends import REGISTRY

DOCS = Path(__file__).parents[2] / "docs"
REPORTS = sorted(DOCS.glob("selftest/*.json"))


def serves(backend, target):
    return any(backend.serves(target, scheme) for scheme in SCHEMES)


def test_a_backend_for_blackwell_alone_is_marked_until_a_report_has_run_it():
    rows = [row for path in REPORTS for row in json.loads(path.read_text())["rows"]]
    ran = {row["backend"] for row in rows if row["calls"] and not row["failures"]}
    ran -= {row["backend"] for row in rows if row["failures"]}
    for_blackwell = {
        name for name, b in REGISTRY.items() if serves(b, "sm100") and not serves(b, "sm90")
    }
    assert for_blackwell
    assert {name for name, b in REGISTRY.items() if b.never_run} == for_blackwell - ran


MARK = "compiled, never run"
PAGES = [DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(text):
    """Heading and text of paragraphs, items of lists, and rows of tables behind their header."""
    heading, header = "", None
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if lines and lines[0].startswith("#"):
            heading = lines[0]
        if lines and lines[0].startswith("|"):
            header, *rows = lines
            yield from ((heading, f"{header} {row}") for row in [header, *rows])
        else:
            yield from ((heading, item) for item in re.split(r"\n(?=[*-] )", paragraph))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_whatever_names_a_marked_backend_says_so(page):
    """In the same paragraph, item or row, in the header of the table, or in the section's title."""
    marked = [name for name, b in REGISTRY.items() if b.never_run]
    named = re.compile(rf"(?<![\w/])({'|'.join(marked)})(?!\w)" if marked else "(?!)")
    for heading, block in blocks_of(page.read_text()):
        said = " ".join(f"{heading} {block}".replace("*", "").lower().split())
        assert not named.search(block) or MARK in said, block
    assert marked or MARK not in page.read_text()


def test_our_kernels_are_marked_in_check_but_where_a_report_has_run_them():
    ours = [kernel for kernel in all_kernels() if kernel.engine == "moequant"]
    reported = {json.loads(path.read_text())["compute_capability"] for path in REPORTS}
    for kernel in ours:
        if kernel.ran:
            assert {*kernel.ran} == reported
        else:
            assert kernel.from_capability == kernel.to_capability
            assert "{}.{}".format(*kernel.from_capability) in reported


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_the_page_says_what_a_report_has(path):
    """`docs/selftest.md` has a row for each, as it says how to add one."""
    report = json.loads(path.read_text())
    (row,) = [
        line
        for line in (DOCS / "selftest.md").read_text().splitlines()
        if path.name in line and line[0] == "|"
    ]
    rows = report["rows"]
    calls = sum(row["calls"] for row in rows)
    assert f"({report['compute_capability']})" in row
    assert f"{len(rows)} rows of {len({r['backend'] for r in rows})} backends, {calls} calls" in row
    assert ("all passed" in row) == report["ok"]
    assert f"{report['seconds']} s" in row
