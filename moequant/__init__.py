"""Quantize, verify and run Mixture-of-Experts checkpoints."""

from moequant._version import __version__
from moequant.formats import QuantizedWeight, dequantize, quantize

__all__ = ["QuantizedWeight", "__version__", "dequantize", "quantize"]
