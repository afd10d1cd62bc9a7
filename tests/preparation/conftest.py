"""Preparations that are struck by a fault, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def struck():
    """struck(converted, fault, **settings): what became of it; see conversion/fault_server.py."""
    server = Path(__file__).parents[1] / "conversion" / "fault_server.py"
    with subprocess.Popen(
        [sys.executable, str(server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def struck(converted, fault=None, **settings):
            arguments = {"converted": str(converted), **settings}
            process.stdin.write(json.dumps({"arguments": arguments, **(fault or {})}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield struck
        process.stdin.close()
