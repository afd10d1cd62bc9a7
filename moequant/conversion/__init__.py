"""The pipeline from a checkpoint to a converted one: recipe, plan, run, commit."""

from moequant.conversion.pipeline import (
    DEFAULT_WORKERS,
    ConversionResult,
    convert,
    plan_checkpoint,
)
from moequant.conversion.plan import Plan
from moequant.conversion.recipe import Recipe, load_recipe, shipped_recipes

__all__ = [
    "DEFAULT_WORKERS",
    "ConversionResult",
    "Plan",
    "Recipe",
    "convert",
    "load_recipe",
    "plan_checkpoint",
    "shipped_recipes",
]
