"""What calibration measured of the inputs of routed experts: one safetensors file.

Also scales of these inputs that another tool found (`InputScales`).
"""

from moequant.statistics.gaussian import hidden_mean_square, intermediate_mean_square
from moequant.statistics.input_scales import InputScales
from moequant.statistics.inputs import INPUTS, input_of
from moequant.statistics.measured import InputSums, LayerSums
from moequant.statistics.record import DataRecord, StatisticsRecord
from moequant.statistics.shrinkage import PRIOR_TOKENS, shrink
from moequant.statistics.statistics import Statistics
from moequant.statistics.writer import StatisticsWriter

__all__ = [
    "INPUTS",
    "PRIOR_TOKENS",
    "DataRecord",
    "InputScales",
    "InputSums",
    "LayerSums",
    "Statistics",
    "StatisticsRecord",
    "StatisticsWriter",
    "hidden_mean_square",
    "input_of",
    "intermediate_mean_square",
    "shrink",
]
