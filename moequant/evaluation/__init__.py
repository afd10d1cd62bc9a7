"""How far a checkpoint's predictions are from its reference's: perplexity and KL divergence."""

from moequant.evaluation.run import EvaluationPlan, EvaluationResult, ModelResult, evaluate

__all__ = ["EvaluationPlan", "EvaluationResult", "ModelResult", "evaluate"]
