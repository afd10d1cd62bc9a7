from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moequant.benchmarks.serving_process import run_job, run_or_raise
from moequant.errors import MoequantError, UnsupportedError


def test_a_process_that_is_given_up_ends_with_those_it_started(tmp_path, monkeypatch):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import subprocess, sys, time\n__version__ = ''\nSamplingParams = None\n"
        "def LLM(**options):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    print('child', child.pid, flush=True)\n    time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    setup = {
        "checkpoint": "", "device": "cuda", "activations": "format", "batches": [1],
        "steps": 1, "prefill_tokens": 8, "attention_backend": None, "tensor_parallel": 1,
        "expert_parallel": False,
    }  # fmt: skip
    request = {"engine": "vllm", "setup": setup}
    found, log = run_job("engine", request, tmp_path, what="vllm", timeout_s=10)
    assert found == {"error": "vllm did not end within 10 s; allow more by --timeout"}
    child = re.search(r"child (\d+)", log)[1]
    # Ended, or waiting for whoever inherits it to take note.
    state = Path("/proc", child, "stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_machine_that_is_not_measured_in_time_is_said_to_have_printed_nothing(tmp_path):
    said = "^measuring this machine did not end within 0.01 s; allow more .*; it printed nothing$"
    with pytest.raises(MoequantError, match=said):
        run_or_raise("machine", {"device": "cpu"}, tmp_path, timeout_s=0.01)


def test_a_job_that_fails_is_raised_with_what_it_printed_last(tmp_path):
    said = r"(?s)'device'; it printed last:\n.*KeyError: 'device'$"
    with pytest.raises(MoequantError, match=said):
        run_or_raise("machine", {}, tmp_path, timeout_s=600)


def test_a_device_that_cannot_be_used_is_said_alone(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UnsupportedError, match=r"^device 'cuda' cannot be used") as raised:
        run_or_raise("machine", {"device": "cuda"}, tmp_path, timeout_s=600)
    assert "printed" not in str(raised.value)
