"""A report of converted checkpoints: what is known of them, as data and as one HTML page."""

from moequant.reporting.pictures import Picture, pictures_of
from moequant.reporting.report import ModelReport, make_report

__all__ = ["ModelReport", "Picture", "make_report", "pictures_of"]
