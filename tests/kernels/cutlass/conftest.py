from __future__ import annotations

from pathlib import Path

import pytest
from load_module import load_module


@pytest.fixture(scope="session")
def ptx_interpreter():
    """The module ptx_interpreter.py."""
    return load_module(Path(__file__).with_name("ptx_interpreter.py"))
