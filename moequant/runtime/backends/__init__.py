"""Ways to run the experts of a layer, best first."""

from __future__ import annotations

from moequant.runtime.backends.base import Backend, ExpertsBackend, FusedBackend, Workload
from moequant.runtime.backends.sm90_fp8_block import Sm90Fp8Block
from moequant.runtime.backends.torch_reference import TorchReference

REGISTRY: dict[str, Backend] = {b.name: b for b in (Sm90Fp8Block(), TorchReference())}

__all__ = ["REGISTRY", "Backend", "ExpertsBackend", "FusedBackend", "Workload"]
