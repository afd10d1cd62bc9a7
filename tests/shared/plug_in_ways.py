"""Formats in dialects whose routed experts vLLM with the plug-in runs."""

from __future__ import annotations

from moequant.dialects import REGISTRY

NOT_SERVED = ("fp8_tensor", "modelopt")
"""vLLM runs these itself; the plug-in refuses them by name."""


def ways_of(*dialects):
    """Each (format, dialect) of these dialects that is served."""
    return [
        (format, dialect)
        for dialect in dialects
        for format in REGISTRY[dialect].carried
        if (format, dialect) != NOT_SERVED
    ]


SINGLE_WAYS = ways_of("fp8", "compressed-tensors", "modelopt")
"""Of the dialects that hold each expert's matrices by themselves, as most models' releases do."""
