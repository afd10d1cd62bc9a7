"""Quantize, verify and run Mixture-of-Experts checkpoints.

Everything public is below. `import moequant` is instant: torch and the rest load with the first
name that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant._version import __version__

if TYPE_CHECKING:
    from moequant.conversion import ConversionResult, Recipe, convert
    from moequant.errors import (
        ArchitectureError,
        CheckpointError,
        MoequantError,
        NonFiniteError,
        NumericsError,
        RecipeError,
        UnsupportedError,
    )
    from moequant.formats import QuantizedWeight, dequantize, quantize
    from moequant.preparation import PreparationResult, prepare
    from moequant.publishing import PushResult, push
    from moequant.runtime import FusedExperts, load_experts
    from moequant.verification import Report, verify
else:
    # Not seen by type checkers: to them a misspelt name must stay an error.
    _HOME = {
        "conversion": ("ConversionResult", "Recipe", "convert"),
        "errors": (
            "ArchitectureError",
            "CheckpointError",
            "MoequantError",
            "NonFiniteError",
            "NumericsError",
            "RecipeError",
            "UnsupportedError",
        ),
        "formats": ("QuantizedWeight", "dequantize", "quantize"),
        "preparation": ("PreparationResult", "prepare"),
        "publishing": ("PushResult", "push"),
        "runtime": ("FusedExperts", "load_experts"),
        "verification": ("Report", "verify"),
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for module, names in _HOME.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f"moequant.{module}"), name)
                return value
        raise AttributeError(f"module 'moequant' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "ArchitectureError",
    "CheckpointError",
    "ConversionResult",
    "FusedExperts",
    "MoequantError",
    "NonFiniteError",
    "NumericsError",
    "PreparationResult",
    "PushResult",
    "QuantizedWeight",
    "Recipe",
    "RecipeError",
    "Report",
    "UnsupportedError",
    "__version__",
    "convert",
    "dequantize",
    "load_experts",
    "prepare",
    "push",
    "quantize",
    "verify",
]
