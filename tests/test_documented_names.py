"""Names that the documentation says belong to a module are there."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from moequant import layouts, runtime
from moequant.formats import REGISTRY as FORMATS
from moequant.runtime import ExpertWeights, FusedExperts, batched
from moequant.runtime import backends as runtime_backends
from moequant.runtime.batched import BatchedTokens
from moequant.runtime.warm_up import Mode

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")}
NO_MODULES = ("moequant.json", "moequant.backends")
"""A file and an entry point."""
MODULE = r"`(moequant(?:\.\w+)+)`"
OF_MODULE = re.compile(rf"((?:`\w+`(?:, | and ))*`\w+`)\sof\s{MODULE}")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def find(path):
    """What a dotted name stands for: a module, or a name in one."""
    try:
        return import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(find(module), name)


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_can_be_imported(page):
    for path in set(re.findall(MODULE, PAGES[page])) - {*NO_MODULES}:
        assert find(path) is not None, path


@pytest.mark.parametrize("page", PAGES)
def test_names_of_a_module_are_in_it(page):
    """As in "`permute`, `reduce` of `moequant.runtime.routing`"."""
    for names, path in OF_MODULE.findall(PAGES[page]):
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert hasattr(find(path), name), f"{path}.{name}"


KNOWN = {
    *runtime_backends.REGISTRY,
    *FORMATS,
    *get_args(Mode),
    *inspect.signature(FusedExperts.forward).parameters,
    *ExpertWeights.__annotations__,
    *(f"BatchedTokens.{field}" for field in BatchedTokens.__annotations__),
    *(name for owner in (runtime, batched, layouts, FusedExperts) for name in dir(owner)),
}
"""What the table below may name without its module."""


def test_counterparts_of_vllm_are_there():
    text = PAGES["runtime.md"]
    table = text[text.index("| vLLM | moequant |") :].split("\n\n")[0]
    cells = [line.split("|")[2] for line in table.splitlines()[2:]]
    # Those with their module are found by the tests above.
    names = [name for cell in cells for name in NAME.findall(OF_MODULE.sub("", cell))]
    assert "FusedExperts" in names
    assert {*names} <= KNOWN
