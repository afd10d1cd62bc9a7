"""The GPU of a measurement, and the versions of its software."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from moequant._version import __version__
from moequant.device import usable_device
from moequant.errors import UnsupportedError

_ADVICE = "run this where there is a CUDA device, with a torch that is built for it"


def cuda_device(device: torch.device | str) -> torch.device:
    """A CUDA device with its index; raises UnsupportedError if there is no such device."""
    place = usable_device(device, advice=_ADVICE)
    if place.type != "cuda":
        raise UnsupportedError(
            f"device {str(device)!r}: experts are timed by replaying CUDA graphs; choose a CUDA "
            "device"
        )
    return place


def describe_machine(device: torch.device) -> dict[str, str]:
    """GPU and versions; without the driver's if nvidia-smi does not run."""
    from triton import __version__ as triton

    versions = {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _driver(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton,
        "moequant": __version__,
    }
    return {name: text for name, text in versions.items() if text}


def describe_cpu() -> dict[str, str]:
    """Processor and versions."""
    return {
        "processor": processor_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moequant": __version__,
    }


def _driver() -> str:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.split("\n")[0].strip()


def processor_name() -> str:
    """The name of the processor, as Linux or Python knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
