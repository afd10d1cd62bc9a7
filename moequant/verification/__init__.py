"""Is a converted checkpoint right: structure, weights, prepared files, layers."""

from moequant.verification.pipeline import verify
from moequant.verification.report import (
    FormatSummary,
    LayerCheck,
    Problem,
    Report,
    WeightCheck,
)

__all__ = ["FormatSummary", "LayerCheck", "Problem", "Report", "WeightCheck", "verify"]
