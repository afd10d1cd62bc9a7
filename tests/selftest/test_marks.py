"""Backends for Blackwell are marked until a report from such a GPU lies in docs/selftest."""

from __future__ import annotations

import json
from pathlib import Path

from moequant.runtime.activations import SCHEMES
from moequant.runtime.backends import REGISTRY

REPORTS = sorted(Path(__file__).parents[2].glob("docs/selftest/*.json"))


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
