"""Every error that moequant raises on purpose, with its exit code on the command line.

MoequantError            1   any other expected failure
├── CheckpointError      3   a checkpoint is malformed, incomplete or inconsistent
│   └── NonFiniteError   3   a weight holds NaN or Inf
├── UnsupportedError     4   valid input that moequant does not support: a shape, an architecture
├── NumericsError        5   an error beyond its limit, or bytes that differ from the expected ones
├── RecipeError          6   an invalid recipe or format option
└── ArchitectureError    6   an invalid description of an architecture

Exit code 2 is click's for wrong usage, 130 for an interrupt. A message names the thing, the value
found, the value expected and the next step.
"""


class MoequantError(Exception):
    """Base class of all errors below; any other exception is a bug."""

    exit_code = 1


class CheckpointError(MoequantError):
    """A checkpoint is malformed, incomplete or inconsistent."""

    exit_code = 3


class NonFiniteError(CheckpointError):
    """A weight holds NaN or Inf."""


class UnsupportedError(MoequantError):
    """Valid input that moequant does not support: a shape, a dtype, an architecture, a device."""

    exit_code = 4


class NumericsError(MoequantError):
    """An error beyond its limit, or bytes that differ from the expected ones."""

    exit_code = 5


class RecipeError(MoequantError):
    """An invalid recipe or format option."""

    exit_code = 6


class ArchitectureError(MoequantError):
    """An invalid description of an architecture."""

    exit_code = 6
