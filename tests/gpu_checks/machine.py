"""The GPUs and processor cores of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_QUERY = "index,name,memory.total,compute_cap,uuid"
_LARGE_LAYER_GB = 40
"""GPU memory of a test with a layer of a real model's size."""
_SMALL_TEST_GB = 6
"""GPU memory of a process of pytest with other tests, at most."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, by its number in nvidia-smi."""

    index: int
    name: str
    memory_gb: float
    capability: str


@dataclass(frozen=True)
class Machine:
    """What tasks are distributed over: GPUs, and cores, of which each GPU has its share."""

    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]

    def cores_of(self, gpus):
        """The cores of tasks on these GPUs; with fewer cores than GPUs, some share one."""
        each = len(self.cores) // len(self.gpus)
        if each == 0:
            return [self.cores[self._place(gpu) % len(self.cores)] for gpu in gpus]
        places = [self._place(gpu) * each for gpu in gpus]
        return [core for place in places for core in self.cores[place : place + each]]

    def _place(self, gpu):
        return [one.index for one in self.gpus].index(gpu)

    def jobs(self, task, gpus):
        """Processes for small tests of a task: as its share of GPUs and cores has room for."""
        of_memory = int(self._memory_gb(gpus) // (_SMALL_TEST_GB * task.beside))
        return max(1, min(of_memory, len(self.cores_of(gpus)) // task.beside))

    def large_jobs(self):
        """Processes for tests with layers of real models' sizes: 2 in 80 GB, 3 in 141 GB."""
        return max(1, int(self._memory_gb(gpu.index for gpu in self.gpus)) // _LARGE_LAYER_GB)

    def _memory_gb(self, gpus):
        """Of the smallest of these GPUs."""
        chosen = set(gpus)
        return min(gpu.memory_gb for gpu in self.gpus if gpu.index in chosen)


def parse_gpus(text, visible):
    """GPUs that nvidia-smi prints as CSV.

    Args:
        text: what it prints.
        visible: CUDA_VISIBLE_DEVICES: numbers as nvidia-smi has them, or beginnings of UUIDs; None
            for all.

    Raises:
        ValueError: a line is not one of a whole GPU.
    """
    found = []
    allowed = None if visible is None else [part.strip() for part in visible.split(",")]
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 5 or not parts[2].isdecimal():
            raise ValueError(f"nvidia-smi prints {line!r}, but should print {_QUERY}")
        index, name, mebibytes, capability, uuid = parts
        if allowed is None or any(
            part == index or (part.startswith("GPU-") and uuid.startswith(part)) for part in allowed
        ):
            found.append(Gpu(int(index), name, float(mebibytes) * 2**20 / 1e9, capability))
    return tuple(found)


def this_machine():
    """This machine; only GPUs in CUDA_VISIBLE_DEVICES, if that is set.

    Raises:
        ValueError: nvidia-smi fails, or prints what it does not print on machines with whole GPUs.
    """
    text, visible = "", os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and "MIG" in visible:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}: MIG instances are not supported")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        except subprocess.TimeoutExpired as error:
            raise ValueError("nvidia-smi does not answer within 60 s") from error
        except subprocess.CalledProcessError as error:
            raise ValueError(
                f"nvidia-smi fails: {(error.stdout + error.stderr).strip()}"
            ) from error
        text = done.stdout
    return Machine(parse_gpus(text, visible), tuple(sorted(os.sched_getaffinity(0))))
