"""Is a converted checkpoint right: structure, weights, layers."""

from moequant.verification.pipeline import verify
from moequant.verification.report import (
    FormatSummary,
    LayerError,
    Problem,
    Report,
    WeightError,
)

__all__ = ["FormatSummary", "LayerError", "Problem", "Report", "WeightError", "verify"]
