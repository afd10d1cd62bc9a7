"""Import a file that is in no package, as all files of tests are."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location


def load_module(path):
    """The module of a file, made anew by each call."""
    # Conftests, for one, differ by their folders alone.
    spec = spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module
