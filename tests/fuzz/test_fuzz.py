"""A short run of the fuzzer, of the same cases each time; fuzz.py runs as long as one likes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("fuzz.py")


def test_no_case_ends_in_a_surprise():
    command = [sys.executable, str(SCRIPT), "--cases", "240", "--minutes", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["faults"] == []
    assert set(document["cases"].values()) == {30}
