from __future__ import annotations

import json
import math
from collections import defaultdict

import pytest

from moequant.models import TensorRole
from moequant.verification import Problem, WeightCheck
from moequant.verification.findings import KEPT_PROBLEMS, KEPT_WEIGHTS, Findings, WeightChecks

ROLES = defaultdict(lambda: TensorRole(role="attention", layer=0))


def error(name, noise, signal=1.0, format="mxfp4", **more):
    return WeightCheck(name=name, format=format, signal=signal, noise=noise, **more)


def test_decibels_and_relative_error_agree():
    e = error("w", noise=0.1, signal=1.0, reference_noise=0.05)
    assert e.relative_error == 0.1
    assert e.sqnr_db == pytest.approx(20)
    assert e.lost_db == pytest.approx(20 * math.log10(2))


def test_a_weight_without_noise_has_no_error_and_json_without_infinities():
    e = error("w", noise=0.0, signal=0.0, reference_noise=0.0)
    assert (e.relative_error, e.sqnr_db, e.lost_db) == (0.0, math.inf, 0.0)
    assert json.loads(json.dumps(e.to_json(), allow_nan=False))["sqnr_db"] is None


def test_noise_where_the_reference_has_none_loses_without_end():
    assert error("w", noise=0.1, reference_noise=0.0).lost_db == math.inf


def test_only_the_worst_weights_are_kept_worst_first():
    errors = WeightChecks(ROLES)
    for i in range(3 * KEPT_WEIGHTS):
        errors.add(error(f"w{i}", noise=((7 * i) % 60) / 100))
    noises = [e.noise for e in errors.worst]
    assert noises == sorted(noises, reverse=True)
    assert len(noises) == KEPT_WEIGHTS
    assert noises[0] == 0.59


def test_a_weight_that_is_not_a_number_is_the_worst():
    errors = WeightChecks(ROLES)
    for name, noise in (("a", 0.1), ("b", math.nan), ("c", 0.9)):
        errors.add(error(name, noise))
    assert errors.worst[0].name == "b"
    (summary,) = errors.summaries()
    assert summary.worst.name == "b"
    json.dumps(summary.to_json(), allow_nan=False)


def test_a_summary_is_the_error_of_all_weights_together():
    errors = WeightChecks(ROLES)
    errors.add(error("a", noise=0.8, signal=3.0, format="w4a8", effective_noise=0.6))
    errors.add(error("b", noise=0.6, signal=4.0, format="w4a8", effective_noise=0.8))
    errors.add(error("c", noise=1.0, signal=2.0, format="nvfp4"))
    w4a8, nvfp4 = (summary.to_json() for summary in errors.summaries())
    assert (w4a8["format"], w4a8["weights"], w4a8["worst"]["name"]) == ("w4a8", 2, "a")
    assert w4a8["relative_error"] == pytest.approx(0.2)
    assert w4a8["effective_relative_error"] == pytest.approx(0.2)
    assert w4a8["worst"]["relative_error"] == pytest.approx(0.8 / 3)
    assert (nvfp4["weights"], nvfp4["relative_error"]) == (1, 0.5)
    assert nvfp4["effective_relative_error"] is None


def test_problems_beyond_a_number_are_counted_only():
    findings = Findings()
    for i in range(KEPT_PROBLEMS + 5):
        findings.add("weights", f"w{i}", "wrong")
    findings.add("config", "config.json", "wrong")
    assert findings.count == KEPT_PROBLEMS + 6
    assert len(findings.problems) == KEPT_PROBLEMS + 1
    assert findings.problems[-1] == Problem(check="config", name="config.json", message="wrong")
    assert str(findings.problems[-1]) == "config.json: wrong"


def test_errors_are_grouped_by_role_layer_and_projection_with_one_number_an_expert():
    def expert(index, projection):
        return TensorRole(role="routed_experts", layer=3, expert=index, projection=projection)

    roles = {"a": expert(0, "down"), "c": expert(2, "down"), "g": expert(0, "gate")}
    checks = WeightChecks({**roles, "q": TensorRole(role="attention", layer=3)})
    checks.add(error("a", noise=0.6, signal=3.0))
    checks.add(error("c", noise=0.8, signal=4.0))
    checks.add(error("g", noise=math.nan))
    checks.add(error("q", noise=0.123456))
    down, gate, attention = (group.to_json() for group in checks.groups())
    assert (down["role"], down["layer"], down["projection"]) == ("routed_experts", 3, "down")
    assert down["relative_error"] == pytest.approx(0.2)  # sqrt(0.6^2 + 0.8^2) / 5
    assert (down["weights"], down["experts"]) == (2, [0.2, None, 0.2])
    assert (gate["relative_error"], gate["experts"]) == (None, [None])
    assert (attention["projection"], attention["experts"]) == (None, [])
