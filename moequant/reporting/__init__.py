"""A report of converted checkpoints: what is known of them, as data and as one HTML page."""

from moequant.reporting.report import ModelReport, make_report

__all__ = ["ModelReport", "make_report"]
