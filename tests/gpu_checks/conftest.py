"""Scripts of this folder import each other by name: it is put at the end of the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from machine import Gpu, Machine
from task import Task


@pytest.fixture
def machine():
    """machine(gpus): a machine with so many GPUs of SM90, 80 GB each, and two cores."""

    def make(gpus):
        found = tuple(Gpu(index, "H100", 85.0, "9.0") for index in range(gpus))
        return Machine(found, (0, 1))

    return make


@pytest.fixture
def tiny():
    """tiny(name, command, **fields): a task of one second."""

    def make(name, *commands, **fields):
        return Task(name=name, commands=commands or ("true",), **{"estimate_s": 1, **fields})

    return make
