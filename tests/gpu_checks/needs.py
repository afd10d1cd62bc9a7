"""What tasks need of a machine, and the words for what is not there."""

from __future__ import annotations

import shutil
from importlib.util import find_spec


def _package(module, name):
    def why_not(machine):
        spec = find_spec(module)
        # A folder of that name without a package has no origin.
        return None if spec is not None and spec.origin else f"needs the package {name}"

    return why_not


def _program(name):
    def why_not(machine):
        return None if shutil.which(name) else f"needs {name} on the PATH"

    return why_not


def _sm90(machine):
    if all(gpu.capability == "9.0" for gpu in machine.gpus):
        return None
    return "needs GPUs of compute capability 9.0"


NEEDS = {
    "sm90": _sm90,
    "vllm": _package("vllm", "vllm"),
    "uvicorn": _package("uvicorn", "uvicorn"),
    "transformers": _package("transformers", "transformers"),
    "humming": _package("humming", "humming-kernels"),
    "cutlass": _package("cutlass", "nvidia-cutlass-dsl"),
    "deep_gemm": _package("deep_gemm", "sgl-deep-gemm"),
    "compute-sanitizer": _program("compute-sanitizer"),
}
"""By name: a function of the machine that returns why it does not do, or None."""


def why_not(task, machine):
    """The first reason why a machine cannot run a task, or None."""
    if not machine.gpus:
        return "needs a GPU"
    if task.gpus > len(machine.gpus):
        return f"needs {task.gpus} GPUs"
    reasons = (NEEDS[name](machine) for name in task.needs)
    return next((reason for reason in reasons if reason), None)
