"""Copies of a converted checkpoint in the layouts that kernels read."""

from moequant.preparation.pipeline import PreparationResult, prepare
from moequant.runtime.prepared import PreparedCheckpoint

__all__ = ["PreparationResult", "PreparedCheckpoint", "prepare"]
