"""Ways to run the experts of a layer, best first."""

from __future__ import annotations

from moequant.runtime.backends.base import Backend, Workload
from moequant.runtime.backends.torch_reference import TorchReference

REGISTRY: dict[str, Backend] = {b.name: b for b in (TorchReference(),)}

__all__ = ["REGISTRY", "Backend", "Workload"]
