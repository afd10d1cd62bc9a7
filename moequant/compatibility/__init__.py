"""Which engines load a checkpoint, with which kernels, at which sizes, and why not."""

from moequant.compatibility.check import (
    CompatibilityReport,
    EngineReport,
    GpuReport,
    check_checkpoint,
)
from moequant.compatibility.checkpoint_facts import Examined, examine
from moequant.compatibility.facts import Defect, Facts, Placement
from moequant.compatibility.gpus import GPUS, Gpu, find_gpu
from moequant.compatibility.kv_cache import KvCache
from moequant.compatibility.memory import GpuMemory, Memory, WeightSizes, least_ranks
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
    "Gpu",
    "GpuMemory",
    "GpuReport",
    "KvCache",
    "Memory",
    "Placement",
    "Said",
    "Verdict",
    "WeightSizes",
    "check_checkpoint",
    "examine",
    "find_gpu",
    "judge",
    "least_ranks",
    "warnings_of",
]
