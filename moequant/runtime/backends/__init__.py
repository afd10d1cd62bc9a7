"""Ways to run the experts of a layer, best first."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from moequant.runtime.backends.base import TARGETS, Backend, PackedExperts
from moequant.runtime.backends.cutlass_fp4 import CutlassFp4, CutlassFp4Batched
from moequant.runtime.backends.cutlass_fp8 import CutlassFp8, CutlassFp8Batched
from moequant.runtime.backends.deepgemm import DeepGemm, DeepGemmBatched
from moequant.runtime.backends.deepgemm_fp4 import DeepGemmFp4, DeepGemmFp4Batched
from moequant.runtime.backends.layout import Layout
from moequant.runtime.backends.naive_batched import NaiveBatched
from moequant.runtime.backends.planned import PlannedExperts
from moequant.runtime.backends.routed import BatchedExperts, StandardExperts
from moequant.runtime.backends.sm90_fp8_block import Sm90Fp8Block
from moequant.runtime.backends.sm90_fp8_channel import Sm90Fp8Channel
from moequant.runtime.backends.sm90_w4a8 import Sm90Mxfp4Fp8, Sm90W4a8
from moequant.runtime.backends.sm90_w4a16 import Sm90W4a16
from moequant.runtime.backends.stacked import STACKED
from moequant.runtime.backends.third_party import load_third_party
from moequant.runtime.backends.torch_reference import TorchReference
from moequant.runtime.backends.triton_portable import TritonBatched, TritonPortable
from moequant.runtime.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Collection

REGISTRY: dict[str, Backend] = {
    b.name: b
    for b in (
        Sm90Fp8Block(),
        Sm90W4a8(),
        Sm90Mxfp4Fp8(),
        Sm90W4a16(),
        Sm90Fp8Channel(),
        DeepGemm(),
        CutlassFp8(),
        CutlassFp4(),
        DeepGemmFp4(),
        TritonPortable(),
        TorchReference(),
        DeepGemmBatched(),
        CutlassFp8Batched(),
        CutlassFp4Batched(),
        DeepGemmFp4Batched(),
        TritonBatched(),
        NaiveBatched(),
    )
}
"""Ours."""


@cache
def backends() -> dict[str, Backend]:
    """Ours, then those of other packages; their modules are imported by the first call."""
    return {**REGISTRY, **load_third_party(frozenset(REGISTRY))}


def never_run_readers(layouts: Collection[str]) -> list[str]:
    """Names of our backends that read one of these layouts and that no GPU has run."""
    return [
        backend.name
        for backend in REGISTRY.values()
        if backend.never_run and {layout.name for layout in backend.layouts} & {*layouts}
    ]


__all__ = [
    "REGISTRY",
    "STACKED",
    "TARGETS",
    "Backend",
    "BatchedExperts",
    "Layout",
    "PackedExperts",
    "PlannedExperts",
    "StandardExperts",
    "Workload",
    "backends",
    "never_run_readers",
]
