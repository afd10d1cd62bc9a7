"""Run converted experts."""

from moequant.runtime.experts import FusedExperts
from moequant.runtime.load import load_experts
from moequant.runtime.select import select
from moequant.runtime.weights import ExpertWeights

__all__ = ["ExpertWeights", "FusedExperts", "load_experts", "select"]
