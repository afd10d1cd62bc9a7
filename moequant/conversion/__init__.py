"""The pipeline from a checkpoint to a converted one: recipe, plan, run, commit.

The first names are for users. The others are for verification, which plans and converts again.
"""

from moequant.conversion.apply_recipe import check_whole_layers, units_of_formats
from moequant.conversion.commit import file_entries, planned_files
from moequant.conversion.error_limit import beyond_limit
from moequant.conversion.finished_shard import UsedQuantizer
from moequant.conversion.items import dequantizing_units
from moequant.conversion.journal import is_unfinished
from moequant.conversion.merging import merged_errors
from moequant.conversion.pipeline import DEFAULT_WORKERS, convert
from moequant.conversion.plan import Plan, plan_checkpoint
from moequant.conversion.planned_conversion import ConversionResult
from moequant.conversion.quantize_unit import (
    convert_again,
    convert_unit,
    requantization_error,
)
from moequant.conversion.recipe import Recipe, load_recipe, shipped_recipes
from moequant.conversion.record import (
    check_recorded_statistics,
    converted_config,
    copied_sidecars,
    recorded_claims,
    recorded_recipe,
)
from moequant.conversion.requantization_error import (
    RequantizationError,
    error_of_tiles,
)
from moequant.conversion.shards import unit_outputs
from moequant.conversion.units import Unit, Weight, quantizer_jobs
from moequant.conversion.weighted_search import weight_counts

__all__ = [
    "DEFAULT_WORKERS",
    "ConversionResult",
    "Plan",
    "Recipe",
    "RequantizationError",
    "Unit",
    "UsedQuantizer",
    "Weight",
    "beyond_limit",
    "check_recorded_statistics",
    "check_whole_layers",
    "convert",
    "convert_again",
    "convert_unit",
    "converted_config",
    "copied_sidecars",
    "dequantizing_units",
    "error_of_tiles",
    "file_entries",
    "is_unfinished",
    "load_recipe",
    "merged_errors",
    "plan_checkpoint",
    "planned_files",
    "quantizer_jobs",
    "recorded_claims",
    "recorded_recipe",
    "requantization_error",
    "shipped_recipes",
    "unit_outputs",
    "units_of_formats",
    "weight_counts",
]
