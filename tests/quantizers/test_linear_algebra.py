from __future__ import annotations

import ast
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moequant.formats import quantize
from moequant.quantizers import linear_algebra
from moequant.quantizers.gptq import Gptq

THREADS = 6
ROOT = Path(__file__).parents[2]


class LazyLibrary:
    """`cholesky_ex` as on CUDA: the first call loads it, and refuses those that come meanwhile."""

    def __init__(self):
        self.compute, self.state, self.calls = torch.linalg.cholesky_ex, "not loaded", 0
        self.lock = threading.Lock()

    def __call__(self, H):
        with self.lock:
            self.calls += 1
            is_first, self.state = self.state == "not loaded", self.state.replace("not ", "being ")
            if not is_first and self.state == "being loaded":
                raise RuntimeError("lazy wrapper should be called at most once")
        if is_first:
            time.sleep(0.05)
            self.state = "loaded"
        return self.compute(H)


@pytest.fixture
def library(monkeypatch):
    lazy = LazyLibrary()
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lazy)
    monkeypatch.setattr(linear_algebra, "_loaded", set())
    return lazy


def together(call):
    """Call it in several threads that start at once."""
    start = threading.Barrier(THREADS)

    def run(_):
        start.wait()
        return call()

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_the_library_of_this_test_refuses_threads_that_come_together(library):
    with pytest.raises(RuntimeError, match="lazy wrapper"):
        together(lambda: torch.linalg.cholesky_ex(torch.eye(2)))


def test_threads_that_round_come_when_the_library_is_loaded(library):
    w, H = torch.linspace(-3, 5, 128).reshape(4, 32).sin(), torch.eye(32) + 0.5
    q = quantize(w, "mxfp4")
    found = together(lambda: Gptq(H).round(w, q))
    assert {one.damping for one in found} == {0.01}
    assert library.calls == THREADS + 1


def test_the_factor_is_lower_and_none_of_what_is_not_positive_definite():
    H = torch.tensor([[4.0, 2.0], [2.0, 5.0]], dtype=torch.float64)
    assert torch.equal(linear_algebra.cholesky(H), torch.tensor([[2.0, 0.0], [1.0, 2.0]]).double())
    assert linear_algebra.cholesky(-H) is None


def test_nothing_else_in_the_package_calls_what_torch_loads_late():
    """All of torch.linalg but norms, and the older names of the same."""
    late = {"cholesky", "inverse", "lu", "pinverse", "qr", "svd"}
    callers = set()
    for folder in ("moequant", "cli", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "linalg" not in text and not any(f"torch.{name}" in text for name in late):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Attribute):
                    name = ast.unparse(node)
                    is_linalg = name.startswith("torch.linalg.") and "norm" not in node.attr
                    if is_linalg or (name == f"torch.{node.attr}" and node.attr in late):
                        callers.add(path.name)
                elif isinstance(node, ast.ImportFrom | ast.Import):
                    names = [f"{getattr(node, 'module', '')}.{a.name}" for a in node.names]
                    assert not any("torch.linalg" in name for name in names), path
    assert callers == {"linear_algebra.py"}
