"""Every error moequant raises on purpose, with the exit code the command line gives it.

MoequantError            1   anything else that was foreseen
├── CheckpointError      3   a checkpoint is malformed, incomplete or contradicts itself
│   └── NonFiniteError   3   a weight holds NaN or Inf
├── UnsupportedError     4   well-formed, but not something we can do: a shape, an architecture
├── NumericsError        5   numbers out of their budget, or bytes that are not what they must be
├── RecipeError          6   a recipe, or an option of a format, that we do not understand
└── ArchitectureError    6   a description of an architecture that we do not understand

Exit code 2 is click's for wrong usage, 130 for an interrupt. A message names the thing, the value
found, the value wanted and the next step.
"""


class MoequantError(Exception):
    """Base of all errors below; `except MoequantError` catches what moequant foresaw."""

    exit_code = 1


class CheckpointError(MoequantError):
    """A checkpoint is malformed, incomplete or contradicts itself."""

    exit_code = 3


class NonFiniteError(CheckpointError):
    """A weight holds NaN or Inf."""


class UnsupportedError(MoequantError):
    """Well-formed, but not something we can do: a shape, a dtype, an architecture, a device."""

    exit_code = 4


class NumericsError(MoequantError):
    """Numbers out of their budget, or bytes that are not what they must be."""

    exit_code = 5


class RecipeError(MoequantError):
    """A recipe, or an option of a format, that we do not understand."""

    exit_code = 6


class ArchitectureError(MoequantError):
    """A description of an architecture that we do not understand."""

    exit_code = 6
