from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ptx_interpreter():
    """The module ptx_interpreter.py: folders of tests are no packages."""
    path = Path(__file__).parent / "ptx_interpreter.py"
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
