"""Every error that moequant raises on purpose, with its exit code on the command line.

A message names the thing, the value found, the value expected and the next step. Exit code 2 is
click's for wrong usage, 130 is an interrupt.
"""


class MoequantError(Exception):
    """Base class of all errors below; any other exception is a bug."""

    exit_code = 1


class CheckpointError(MoequantError):
    """A checkpoint is malformed, incomplete or inconsistent."""

    exit_code = 3


class NonFiniteError(CheckpointError):
    """A weight holds NaN or Inf."""


class UnreachableError(CheckpointError):
    """The Hugging Face hub does not answer: no network, or a wrong HF_ENDPOINT."""


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


class StatisticsError(MoequantError):
    """Statistics of activations that are invalid, or that belong to another model."""

    exit_code = 6


class DataError(MoequantError):
    """Text or token ids for calibration, or figures of an evaluation, that cannot be used."""

    exit_code = 6
