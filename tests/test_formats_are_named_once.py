"""A format's facts lie in its own file: few others name it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from moequant.formats import REGISTRY

ROOT = Path(__file__).parents[1]
APART = ("moequant/formats", "moequant/dialects", "kernels")
MOST = 5


def named_in(path):
    """Strings of a file's code; docstrings and comments are prose and do not count."""
    tree = ast.parse(path.read_text("utf-8"))
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in constants if id(node) not in prose}


@pytest.fixture(scope="module")
def files():
    """By file of the product, outside formats, dialects and kernels, its strings."""
    found = [path for top in ("moequant", "cli") for path in (ROOT / top).rglob("*.py")]
    named = {path.relative_to(ROOT).as_posix(): named_in(path) for path in found}
    return {name: strings for name, strings in named.items() if not name.startswith(APART)}


@pytest.mark.parametrize("format", REGISTRY)
def test_few_files_name_a_format(files, format):
    naming = sorted(name for name, strings in files.items() if format in strings)
    assert len(naming) <= MOST, naming
