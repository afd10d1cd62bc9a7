"""What a run computes with: the dtype, the device, and what else decides the last bits."""

from __future__ import annotations

import torch

from moequant.errors import UnsupportedError
from moequant.integrations.transformers_library import import_transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes to compute in, by name."""


def dtype_name_for(dtype: str | None, device: torch.device) -> str:
    """The dtype asked for; by default float32 on a CPU, else bfloat16.

    Raises:
        UnsupportedError: it is not one of DTYPES.
    """
    used = dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if used not in DTYPES:
        raise UnsupportedError(f"dtype {used!r} is not one of {', '.join(DTYPES)}")
    return used


def facts_of_run(device: torch.device, dtype: str) -> dict[str, str]:
    """What decides the last bits of what a model computes."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else device.type,
        "dtype": dtype,
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": import_transformers().__version__,
    }
