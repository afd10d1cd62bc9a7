"""Verify a converted checkpoint: structure, weights, prepared files, layers."""

from moequant.verification.integrity import check_integrity
from moequant.verification.pipeline import verify
from moequant.verification.report import (
    FormatSummary,
    GroupErrors,
    IntegrityReport,
    LayerCheck,
    Problem,
    Report,
    WeightCheck,
)

__all__ = [
    "FormatSummary",
    "GroupErrors",
    "IntegrityReport",
    "LayerCheck",
    "Problem",
    "Report",
    "WeightCheck",
    "check_integrity",
    "verify",
]
