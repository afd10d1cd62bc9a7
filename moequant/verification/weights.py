"""Are the numbers right: every tensor of a converted checkpoint against its source.

Copied tensors must be the source's, byte for byte. Converted ones are converted again where the
record says how, and must be the same bytes; where another tool made them, every element must lie
within the bound of `moequant.verification.bounds`, and every weight within a budget of decibels.
Either way the error of what is on disk is measured. A worker has one unit in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.checkpoint.buffers import tensor_bytes
from moequant.conversion.assign import Unit
from moequant.conversion.plan import COPY_CHUNK_BYTES
from moequant.conversion.run import worker_pool
from moequant.conversion.units import convert_unit
from moequant.errors import MoequantError
from moequant.formats import dequantize, effective_weight, get_format
from moequant.verification.bounds import find_out_of_bound
from moequant.verification.findings import WeightErrors
from moequant.verification.identity import find_difference
from moequant.verification.report import Problem, WeightError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.checkpoint.headers import TensorInfo
    from moequant.checkpoint.source import Checkpoint
    from moequant.conversion.assign import Weight
    from moequant.formats import QuantizedWeight
    from moequant.progress import Progress
    from moequant.verification.expectation import Expectation
    from moequant.verification.findings import Findings
    from moequant.verification.stored import StoredCheckpoint


@dataclass
class _Result:
    problems: list[Problem] = field(default_factory=list)
    errors: list[WeightError] = field(default_factory=list)

    def add(self, name: str, message: object) -> None:
        self.problems.append(Problem(check="weights", name=name, message=str(message)))


def check_weights(
    source: Checkpoint,
    stored: StoredCheckpoint,
    expected: Expectation,
    *,
    workers: int,
    progress: Progress,
    findings: Findings,
) -> WeightErrors:
    """Compare every tensor; those that `check_tensors` found missing or misshapen are passed over.

    Returns:
        The errors of converted weights.

    Raises:
        CheckpointError: a file cannot be read or changes meanwhile, or the source holds NaN or Inf.
    """

    def check(item: Unit | TensorInfo) -> _Result:
        if isinstance(item, Unit):
            result = _check_unit(source, stored, expected, item)
            progress.advance(item.source_bytes, item.name)
        else:
            result = _check_copy(source, stored.checkpoint, item)
            progress.advance(item.size_bytes, item.name)
        return result

    errors = WeightErrors()
    progress.start("weights", sum(info.size_bytes for info in source.tensors.values()))
    with worker_pool(workers) as pool:
        for result in pool.map(check, (*expected.copies, *expected.units)):
            findings.extend(result.problems)
            for error in result.errors:
                errors.add(error)
    progress.finish()
    return errors


def _check_copy(source: Checkpoint, stored: Checkpoint, info: TensorInfo) -> _Result:
    result = _Result()
    found = stored.tensors.get(info.name)
    if found is not None and (found.dtype, found.shape) == (info.dtype, info.shape):
        chunks = (c.chunks(info.name, COPY_CHUNK_BYTES) for c in (stored, source))
        difference = find_difference(zip(*chunks, strict=True), info.dtype, info.shape)
        if difference is not None:
            result.add(info.name, difference)
    return result


def _check_unit(
    source: Checkpoint, stored: StoredCheckpoint, expected: Expectation, unit: Unit
) -> _Result:
    result = _Result()
    if expected.method == "bytes":
        _compare_bytes(source, stored.checkpoint, expected, unit, result)
    weights = {w.info.name: source.read(w.info.name) for w in unit.weights}
    references = _references(unit, weights) if expected.method == "bounds" else {}
    found = {w.info.name: _read_stored(stored, expected, unit, w, result) for w in unit.weights}
    for name, q in found.items():
        if q is None:
            continue
        w, reference = weights[name].float(), references.get(name)
        error = _measure(name, w, q, reference)
        result.errors.append(error)
        if reference is not None:
            _check_bounds(error, w, q, reference, expected.max_lost_db, result)
    if expected.method == "bounds":
        _check_shared_scale(found, result)
    return result


def _compare_bytes(
    source: Checkpoint, stored: Checkpoint, expected: Expectation, unit: Unit, result: _Result
) -> None:
    for name, tensor in convert_unit(source, unit, expected.dialect).items():
        if not _is_as_expected(name, stored, expected):
            continue
        pair = tensor_bytes(stored.read(name)), tensor_bytes(tensor.contiguous())
        difference = find_difference([pair], *expected.tensors[name])
        if difference is not None:
            result.add(name, difference)


def _is_as_expected(name: str, stored: Checkpoint, expected: Expectation) -> bool:
    found = stored.tensors.get(name)
    return found is not None and (found.dtype, found.shape) == expected.tensors[name]


def _references(unit: Unit, weights: Mapping[str, Tensor]) -> dict[str, QuantizedWeight]:
    """What our quantizer makes of a unit."""
    quantized = get_format(unit.format).quantize_fused(
        list(weights.values()), dict(unit.options), names=list(weights)
    )
    return dict(zip(weights, quantized, strict=True))


def _read_stored(
    stored: StoredCheckpoint, expected: Expectation, unit: Unit, weight: Weight, result: _Result
) -> QuantizedWeight | None:
    """A converted weight as it lies on disk; None where a problem names what is wrong with it."""
    files = stored.checkpoint
    suffixes = expected.dialect.suffixes[unit.format]
    names = [f"{weight.module}.{suffix}" for suffix in suffixes]
    known = expected.method == "bytes"
    if any(n in stored.lost or (known and not _is_as_expected(n, files, expected)) for n in names):
        return None
    try:
        tensors = {n: files.read(n) for n in names if n in files.tensors}
        q = expected.dialect.from_disk(weight.module, unit.format, tensors)
    except MoequantError as error:
        result.add(weight.info.name, error)
        return None
    if tuple(q.shape) != weight.info.shape:
        result.add(
            weight.info.name, f"holds {list(q.shape)}, but the source {list(weight.info.shape)}"
        )
        return None
    return q


def _measure(
    name: str, w: Tensor, q: QuantizedWeight, reference: QuantizedWeight | None
) -> WeightError:
    return WeightError(
        name=name,
        format=q.format,
        signal=_norm(w),
        noise=_norm(w - dequantize(q)),
        effective_noise=_norm(w - effective_weight(q)) if q.format == "w4a8" else None,
        reference_noise=None if reference is None else _norm(w - dequantize(reference)),
    )


def _norm(x: Tensor) -> float:
    """Frobenius norm; float64, for squares of float32 overflow and underflow."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _check_bounds(
    error: WeightError,
    w: Tensor,
    q: QuantizedWeight,
    reference: QuantizedWeight,
    max_lost_db: float,
    result: _Result,
) -> None:
    beyond = find_out_of_bound(w, q, reference, max_lost_db)
    if beyond is not None:
        result.add(error.name, beyond)
    # Without noise there are no decibels to lose from; the bound of every element still holds.
    if error.reference_noise and error.lost_db is not None and not error.lost_db <= max_lost_db:
        result.add(
            error.name,
            f"SQNR {error.sqnr_db:.2f} dB, {error.lost_db:.2f} dB below what our quantizer "
            f"reaches, and the budget is {max_lost_db:g} dB",
        )


def _check_shared_scale(found: Mapping[str, QuantizedWeight | None], result: _Result) -> None:
    """Engines that fuse weights take the global scale of the first for all."""
    scales = {
        n: q.global_scale.item()
        for n, q in found.items()
        if q is not None and q.global_scale is not None
    }
    if len(set(scales.values())) > 1:
        listed = " and ".join(f"{scale:.6g} of {name}" for name, scale in scales.items())
        result.add(next(iter(scales)), f"global scales differ within a fused set: {listed}")
