"""Statistics of what experts multiply: a model is run over data, layer by layer."""

from moequant.calibration.run import CalibrationPlan, CalibrationResult, calibrate

__all__ = ["CalibrationPlan", "CalibrationResult", "calibrate"]
