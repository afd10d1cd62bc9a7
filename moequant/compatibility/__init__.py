"""Which engines load a checkpoint, with which kernels, at which sizes, and why not."""

from moequant.compatibility.check import (
    CompatibilityReport,
    EngineReport,
    GpuReport,
    check_checkpoint,
)
from moequant.compatibility.checkpoint_facts import Examined, examine
from moequant.compatibility.facts import Defect, Facts, Placement
from moequant.compatibility.kernels import GPUS
from moequant.compatibility.rules import ENGINES, SERVING, Said, Verdict, judge, warnings_of

__all__ = [
    "ENGINES",
    "GPUS",
    "SERVING",
    "CompatibilityReport",
    "Defect",
    "EngineReport",
    "Examined",
    "Facts",
    "GpuReport",
    "Placement",
    "Said",
    "Verdict",
    "check_checkpoint",
    "examine",
    "judge",
    "warnings_of",
]
