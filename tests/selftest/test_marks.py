"""Backends for Blackwell are marked until a report from such a GPU lies in docs/selftest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda p: p.name
)
def test_a_page_that_names_a_marked_backend_says_so(page):
    text = " ".join(page.read_text().split())
    marked = {name for name, b in REGISTRY.items() if b.never_run}
    named = {name for name in marked if f"`{name}`" in text}
    assert not named or "never run" in text, named
    assert marked or "compiled, never run" not in text


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
