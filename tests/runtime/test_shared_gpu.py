"""Kernels whose CTAs work in clusters, while other processes use the GPU too.

A GPU that several processes share stops one's kernels at any instruction to run another's. CTAs are
then apart by much more than they are otherwise, and what they tell each other comes in orders that
are hardly ever seen in a process alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROCESSES, SECONDS = 5, 2.0
FORMATS = ["fp8_block", "fp8_channel", "w4a8", "mxfp4:fp8_token", "nvfp4"]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of SM90",
)
def test_clusters_of_ctas_run_where_processes_share_the_gpu():
    """In each of several processes, whichever of its CTAs is stopped."""
    script = Path(__file__).parent / "repeat_clusters.py"
    command = [sys.executable, script, str(SECONDS), *FORMATS]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(PROCESSES)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    failed = [
        text[-2000:] for process, text in zip(running, said, strict=True) if process.returncode
    ]
    assert not failed, "\n".join(failed)
