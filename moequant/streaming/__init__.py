"""Run a model over data, one layer in memory at a time: what calibration and evaluation share."""
