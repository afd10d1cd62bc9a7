"""The report of a verification, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moequant.formats import STATIC_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.conversion import RequantizationError, UsedQuantizer

# Roundings of weights and of activations before either GEMM add up as squares: where they are
# alike, to sqrt(3) times the error of weights alone. With scales that fit, layers of random weights
# were off by 1.2 to 2.0 times as much, and by 0.25 to 0.32 in NVFP4, the coarsest format with
# static scales.
UNFIT_RATIO = 3.0
"""Above so many times the error without activations, scales are taken not to fit."""
UNFIT_ERROR = 0.5
"""An error up to this is no reason to warn: a quarter of the output's sum of squares."""

Check = Literal[
    "files",
    "index",
    "config",
    "record",
    "sidecars",
    "tensors",
    "weights",
    "prepared",
    "layers",
    "backend",
]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A fault of a converted checkpoint.

    Attributes:
        check: the check that found it.
        name: the tensor, file or field.
        message: what was found and what was expected.
        stray: whether it is that a file is there, and removing it is all there is to do.
        unusable_record: whether it is that moequant.json does not say which files there are.
    """

    check: Check
    name: str
    message: str
    stray: bool = False
    unusable_record: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"

    def to_json(self) -> dict[str, str]:
        """Plain data, fit for a JSON document; the message says what to do."""
        return {"check": self.check, "name": self.name, "message": self.message}


@dataclass(frozen=True, kw_only=True)
class WeightCheck:
    """The error of one converted weight, or of all weights of a format.

    Attributes:
        name: the source tensor; empty for all of a format.
        format: the format it was converted into.
        signal: ||w||, the Frobenius norm of the source.
        noise: ||w - dequantize(q)||.
        effective_noise: the same for vLLM's effective weight of w4a8 (`effective_weight`), or None.
        reference_noise: the same for our quantizer with default options, if another tool wrote the
            checkpoint; None if bytes were compared.
    """

    name: str
    format: str
    signal: float
    noise: float
    effective_noise: float | None = None
    reference_noise: float | None = None

    @property
    def relative_error(self) -> float:
        """Noise over signal; 0 without noise, infinite without signal."""
        return _ratio(self.noise, self.signal)

    @property
    def sqnr_db(self) -> float:
        """Signal over noise in dB; infinite without noise."""
        return -_decibel(self.relative_error)

    @property
    def lost_db(self) -> float | None:
        """How far the SQNR is below our quantizer's; None if unknown."""
        if self.reference_noise is None:
            return None
        return _decibel(_ratio(self.noise, self.reference_noise)) if self.noise else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; None for what is unknown or not finite."""
        effective = self.effective_noise
        return {
            "name": self.name,
            "format": self.format,
            "relative_error": _finite(self.relative_error),
            "sqnr_db": _finite(self.sqnr_db),
            "effective_relative_error": (
                None if effective is None else _finite(_ratio(effective, self.signal))
            ),
            "lost_db": _finite(self.lost_db),
        }


@dataclass(frozen=True, kw_only=True)
class FormatSummary:
    """All weights of one format.

    Attributes:
        total: their total error.
        weights: number of weights.
        worst: the weight with the largest relative error.
    """

    total: WeightCheck
    weights: int
    worst: WeightCheck

    @property
    def format(self) -> str:
        """The format's name."""
        return self.total.format

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        total = self.total.to_json()
        del total["name"]
        return {**total, "weights": self.weights, "worst": self.worst.to_json()}


@dataclass(frozen=True, kw_only=True)
class GroupErrors:
    """The errors of the weights of one role, layer and projection.

    Attributes:
        role: role of the weights, in the architecture table.
        layer: their layer; None where they have none.
        projection: gate, up or down; None where they are not of an expert.
        format: the format they were converted into.
        weights: how many were measured.
        relative_error: of all together.
        experts: of routed experts, the relative error of each, by its index; None where it was not
            measured or is not finite. Empty for other roles.
    """

    role: str
    layer: int | None
    projection: str | None
    format: str
    weights: int
    relative_error: float
    experts: tuple[float | None, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; errors of experts with four significant digits."""
        return {
            **asdict(self),
            "relative_error": _finite(self.relative_error),
            "experts": [None if e is None else float(f"{e:.4g}") for e in self.experts],
        }


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """The result of running one expert layer.

    Attributes:
        layer: its index.
        format: format of its experts.
        experts: number of experts used.
        tokens: number of tokens.
        runtime_error: largest |y - reference| over its bound; above 1 the runtime is wrong.
        runtime_relative_error: ||y - reference|| / ||reference||, which has a bound of its own.
        layer_error: ||y - source|| / ||source|| without quantized activations.
        activations: what engines quantize its activations by; one of
            `moequant.runtime.activations.SCHEMES`.
        quantized_activations_error: the same with activations quantized so, by static scales where
            the checkpoint has them; None if that was not measured.
        activations_not_measured: why it was not; None if it was.
        input_std: standard deviation of the hidden states: 1, or less for narrow static scales.
        backend: name of the backend that ran it.
        device: where it ran.
        backend_error: ||y - reference|| / ||reference|| of that backend's output, from hidden
            states in bfloat16 and with quantized activations; None where it ran on the CPU
            reference alone.
    """

    layer: int
    format: str
    experts: int
    tokens: int
    runtime_error: float
    runtime_relative_error: float
    layer_error: float
    activations: str
    quantized_activations_error: float | None
    activations_not_measured: str | None
    input_std: float
    backend: str
    device: str
    backend_error: float | None

    @property
    def warning(self) -> str | None:
        """That static scales of activations seem not to fit, and what to do; else None."""
        error, without = self.quantized_activations_error, self.layer_error
        if self.activations not in STATIC_SCHEMES or error is None:
            return None
        if not (error > UNFIT_ERROR and error > UNFIT_RATIO * without):
            return None
        return (
            f"layer {self.layer}: off by {error:.1%} with its activation scales and by "
            f"{without:.1%} without, on random inputs, so the scales may not fit; measure them "
            "with moequant calibrate and convert with --statistics FILE --activation-scales "
            'statistics, or run the experts with --activations none (activations="none")'
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; None for what is not finite."""
        fields = {k: _finite(v) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**fields, "warning": self.warning}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What any check of a whole checkpoint gives.

    Attributes:
        converted: the checkpoint that was checked.
        problem_count: number of problems, including those left out.
        problems: the first problems of each check.
    """

    converted: str
    problem_count: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.problem_count == 0


@dataclass(frozen=True, kw_only=True)
class IntegrityReport(Outcome):
    """The result of `check_integrity`.

    Attributes:
        files: number of files that were read.
        bytes: their total size.
        record: what moequant.json says of the conversion, except digests; None if it is no text.
    """

    files: int
    bytes: int
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys, fit for a JSON document."""
        problems = [problem.to_json() for problem in self.problems]
        return {"ok": self.ok, **asdict(self), "problems": problems}


@dataclass(frozen=True, kw_only=True)
class Report(Outcome):
    """The result of `verify`.

    Attributes:
        source: the source it was verified against.
        architecture: name of its architecture.
        architecture_by: the file that describes it, or moequant.json; None for the built-in table.
        dialect: its dialect; None if unknown.
        method: "bytes" if moequant's record allowed converting again, "bounds" if another tool
            wrote it; None if no weights were compared.
        quantizer: the quantizer for converting again; None if it was not used.
        counts: numbers of tensors and weights that were checked.
        formats: errors by format.
        worst_weights: the weights of largest relative error, worst first.
        errors: errors by role, layer and projection, and of each expert.
        record_sha256: SHA-256 of moequant.json, in hex, which has the digests of all files; None if
            there is none.
        manifests_sha256: SHA-256 of the manifest of each prepared folder, by its target.
        requantization_errors: for a quantized source, the errors by kind of weight.
        not_finite: the copied tensors that hold NaN or Inf, as in the source, each with the first
            one, in words.
        layers: the layers that were run.
        prepared: targets whose prepared folder was found and checked.
    """

    source: str
    architecture: str
    architecture_by: str | None
    dialect: str | None = None
    method: Literal["bytes", "bounds"] | None = None
    quantizer: UsedQuantizer | None = None
    counts: Mapping[str, int]
    formats: tuple[FormatSummary, ...] = ()
    worst_weights: tuple[WeightCheck, ...] = ()
    errors: tuple[GroupErrors, ...] = ()
    record_sha256: str | None = None
    manifests_sha256: Mapping[str, str] = field(default_factory=dict)
    requantization_errors: tuple[RequantizationError, ...] = ()
    not_finite: tuple[str, ...] = ()
    layers: tuple[LayerCheck, ...] = ()
    prepared: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys, fit for a JSON document."""
        quantizer = self.quantizer
        return {
            "ok": self.ok,
            **vars(self),
            "quantizer": quantizer and {"name": quantizer.name, "reason": quantizer.reason},
            "problems": [problem.to_json() for problem in self.problems],
            "counts": dict(self.counts),
            "formats": [summary.to_json() for summary in self.formats],
            "worst_weights": [weight.to_json() for weight in self.worst_weights],
            "errors": [group.to_json() for group in self.errors],
            "requantization_errors": [error.to_json() for error in self.requantization_errors],
            "not_finite": list(self.not_finite),
            "layers": [layer.to_json() for layer in self.layers],
            "prepared": list(self.prepared),
            "manifests_sha256": dict(self.manifests_sha256),
        }


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def _decibel(ratio: float) -> float:
    return 20 * math.log10(ratio) if ratio else -math.inf


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
