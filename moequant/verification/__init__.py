"""Is a converted checkpoint right: structure, weights, layers."""

from moequant.verification.report import (
    FormatSummary,
    LayerError,
    Problem,
    Report,
    WeightError,
)
from moequant.verification.verify import verify

__all__ = ["FormatSummary", "LayerError", "Problem", "Report", "WeightError", "verify"]
