"""The pipeline from a checkpoint to a converted one: recipe, plan, run, commit."""

from moequant.conversion.pipeline import (
    DEFAULT_WORKERS,
    ConversionResult,
    convert,
)
from moequant.conversion.plan import Plan, plan_checkpoint
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
