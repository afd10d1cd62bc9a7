"""Kernel-ready copies of a converted checkpoint, beside the portable files."""

from moequant.preparation.pipeline import PreparationResult, prepare
from moequant.runtime.prepared import PreparedCheckpoint

__all__ = ["PreparationResult", "PreparedCheckpoint", "prepare"]
