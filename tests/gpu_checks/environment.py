"""Variables of the processes of tasks."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
_ENGINES = json.loads((CHECKOUT / "tests" / "engines" / "offline.json").read_text())
"""For engines on a machine without network and without FlashInfer."""


def of_task(task, gpus, *, folder, cores):
    """All variables of a task's processes.

    Engines on different GPUs have caches of their own, which they fill at the same time. Kernels of
    moequant and of Triton are compiled once for all; tilings are those shipped, not the user's.
    """
    cache = folder / "cache"
    name = "-".join(map(str, gpus))
    found = {
        **os.environ,
        **_ENGINES,
        **dict(task.environment),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "MOEQUANT_CACHE_DIR": str(cache / "moequant"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "VLLM_CACHE_ROOT": str(cache / f"vllm-{name}"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / f"inductor-{name}"),
        "MOEQUANT_ENGINES_DIR": str(folder / "engines"),
    }
    found.pop("PYTHONSAFEPATH", None)
    if task.safe_path:
        found["PYTHONSAFEPATH"] = "1"
    return found


def script_of(task, gpus, *, machine, folder, out):
    """A task's command lines for bash, each printed before it runs."""
    fields = {
        "python": shlex.quote(sys.executable),
        "out": shlex.quote(str(out)),
        "folder": shlex.quote(str(folder)),
        "cores": len(machine.cores_of(gpus)),
        "jobs": machine.jobs(task, gpus),
        "large_jobs": machine.large_jobs(),
    }
    return "\n".join(["set -ex", *(command.format_map(fields) for command in task.commands)])
