"""Compare every tensor of a converted checkpoint with its source.

Copied tensors must equal the source's, byte for byte. Converted tensors are converted again if the
record says how, and must have the same bytes. If another tool made them, every element must be
within the bound of `moequant.verification.bounds`, and the SQNR of every weight within a limit. In
both cases the error on disk is measured. A worker holds one unit in memory, and reads source and
result once.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moequant.conversion import (
    RequantizationError,
    Unit,
    beyond_limit,
    convert_again,
    convert_unit,
    error_of_tiles,
    requantization_error,
    unit_outputs,
)
from moequant.errors import MoequantError
from moequant.formats import (
    QuantizedWeight,
    effective_weight,
    float_tiles,
    get_format,
    row_tiles,
    sum_of_squares,
)
from moequant.formats.squares import TILE_ROWS
from moequant.storage.buffers import Arena, tensor_bytes
from moequant.verification.bounds import MAX_LOST_DB, find_out_of_bound, join_out_of_bound
from moequant.verification.findings import WeightChecks
from moequant.verification.identity import compare_tensors, find_difference
from moequant.verification.report import Problem, WeightCheck
from moequant.weights.biases import check_bias
from moequant.weights.places import read_places
from moequant.weights.source_weights import read_stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from torch import Tensor

    from moequant.conversion import Stack, Weight
    from moequant.formats import StoredWeight
    from moequant.progress import Progress
    from moequant.quantizers import Quantizer
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.verification.bounds import OutOfBound
    from moequant.verification.expectation import Expectation
    from moequant.verification.findings import Findings
    from moequant.verification.stored import StoredCheckpoint


_CHUNK_BYTES = 8 << 20
"""Of copied tensors, compared at once."""


@dataclass
class _Result:
    problems: list[Problem] = field(default_factory=list)
    checks: list[WeightCheck] = field(default_factory=list)
    requantization_errors: list[RequantizationError] = field(default_factory=list)

    def add(self, name: str, message: object) -> None:
        self.problems.append(Problem(check="weights", name=name, message=str(message)))


def check_weights(
    source: Checkpoint,
    stored: StoredCheckpoint,
    expected: Expectation,
    *,
    quantizer: Quantizer,
    pool: Executor,
    progress: Progress,
    findings: Findings,
) -> WeightChecks:
    """Compare every tensor, except those that `check_tensors` found missing or misshapen.

    Args:
        source: the source.
        stored: the converted checkpoint.
        expected: its expected content.
        quantizer: converts the source's weights again.
        pool: its threads work on a tensor or a unit each, with one intra-op thread.
        progress: receives the progress.
        findings: collects the problems.

    Returns:
        The errors of converted weights.

    Raises:
        CheckpointError: a file cannot be read or changes meanwhile, or the source holds NaN or Inf.
    """
    own, biases = threading.local(), expected.biases()

    def check(item: Unit | TensorInfo) -> _Result:
        if isinstance(item, Unit) and not item.is_plain:
            arena = own.__dict__.setdefault("arena", Arena(quantizer.allocate))
            result = _check_unit(source, stored, expected, item, quantizer, arena)
            arena.clear()
            progress.advance(item.source_bytes, item.name)
        elif isinstance(item, Unit):
            result = _check_dequantized(source, stored.checkpoint, expected, item, quantizer)
            progress.advance(item.source_bytes, item.name)
        else:
            result = _check_copy(source, stored.checkpoint, item, is_bias=item.name in biases)
            progress.advance(item.size_bytes, item.name)
        return result

    checks = WeightChecks()
    progress.start("weights", sum(info.size_bytes for info in source.tensors.values()))
    for result in pool.map(check, (*expected.copies, *expected.units, *expected.dequantized)):
        findings.extend(result.problems)
        for weight in result.checks:
            checks.add(weight)
        checks.add_requantization_errors(result.requantization_errors)
    progress.finish()
    return checks


def _check_copy(
    source: Checkpoint, stored: Checkpoint, info: TensorInfo, *, is_bias: bool
) -> _Result:
    result = _Result()
    if is_bias:
        check_bias(source, info)
    found = stored.tensors.get(info.name)
    if found is not None and (found.dtype, found.shape) == (info.dtype, info.shape):
        chunks = (c.chunks(info.name, _CHUNK_BYTES) for c in (stored, source))
        difference = find_difference(zip(*chunks, strict=True), info.dtype, info.shape)
        if difference is not None:
            result.add(info.name, difference)
    return result


def _check_unit(
    source: Checkpoint,
    stored: StoredCheckpoint,
    expected: Expectation,
    unit: Unit,
    quantizer: Quantizer,
    arena: Arena,
) -> _Result:
    """Convert a unit again, in the memory of `arena`, and compare."""
    result = _Result()
    names = [weight.info.name for weight in unit.weights]
    weights = read_stored(source, [weight.info for weight in unit.weights], arena)
    wanted: Mapping[str, Tensor] = {}
    references: Sequence[QuantizedWeight | None] = [None] * len(weights)
    if expected.plan is None:
        references = quantizer.quantize_fused(
            get_format(unit.format), weights, unit.options, names=names, empty=arena.empty
        )
    else:
        wanted = convert_again(weights, unit, expected.dialect, quantizer=quantizer, arena=arena)
    found: dict[str, QuantizedWeight] = {}
    for weight, before, reference in zip(unit.weights, weights, references, strict=True):
        q = _read_weight(stored, expected, unit.format, weight, wanted, result, arena)
        if q is not None:
            found[weight.info.name] = q
            squares = quantizer.compare(before, q)
            _judge(weight.info.name, before, q, reference, squares, quantizer, result)
            if isinstance(before, QuantizedWeight):
                error = requantization_error(
                    weight, before, q, dialect=expected.dialect, squares=squares
                )
                result.requantization_errors.append(error)
    if expected.plan is None:
        _check_shared_scale(found, result)
    return result


def _check_dequantized(
    source: Checkpoint,
    stored: Checkpoint,
    expected: Expectation,
    unit: Unit,
    quantizer: Quantizer,
) -> _Result:
    """Check dequantized weights: the source's numbers, rounded to the plain format."""
    result = _Result()
    if len(unit.tiles) > 1:
        _check_tiles(source, stored, expected, unit, quantizer, result)
        return result
    converted = convert_unit(source, unit, expected.dialect, quantizer, Arena(), Arena())
    result.requantization_errors += converted.requantization_errors
    outputs = unit_outputs(unit, expected.dialect)
    for (name, *what), (piece, w) in zip(outputs, converted.tensors.items(), strict=True):
        info = stored.tensors.get(name)
        if info is None or [info.dtype, info.shape] != what:
            continue  # named before
        found = (
            stored.read(name) if unit.stack is None else _part_of(stored, unit.stack, name, w.shape)
        )
        if difference := compare_tensors(found, w):
            result.add(piece, difference)
    return result


def _check_tiles(
    source: Checkpoint,
    stored: Checkpoint,
    expected: Expectation,
    unit: Unit,
    quantizer: Quantizer,
    result: _Result,
) -> None:
    """As `_check_dequantized`, of a weight that is dequantized some rows at a time."""
    ((name, dtype, shape),) = unit_outputs(unit, expected.dialect)
    info = stored.tensors.get(name)
    errors: list[RequantizationError] = []

    def pairs() -> Iterator[tuple[memoryview, memoryview]]:
        for number, tile in enumerate(unit.tiles):
            converted = convert_unit(source, tile, expected.dialect, quantizer, Arena(), Arena())
            errors.extend(converted.requantization_errors)
            (wanted,) = converted.tensors.values()
            if info is not None and (info.dtype, info.shape) == (dtype, shape):
                rows = slice(number * len(wanted), (number + 1) * len(wanted))
                yield tensor_bytes(stored.read(name, rows)), tensor_bytes(wanted)

    difference = find_difference(pairs(), dtype, shape)
    if difference is not None:
        result.add(name, difference)
    result.requantization_errors.append(error_of_tiles(errors))


def _part_of(stored: Checkpoint, stack: Stack, name: str, shape: Sequence[int]) -> Tensor:
    """One expert's part, of a shape, of a tensor that stacks experts."""
    height = shape[0] if stack.flat else 1
    rows = slice(stack.expert * height, (stack.expert + 1) * height)
    return stored.read(name, rows).reshape(*shape)


def _read_weight(
    stored: StoredCheckpoint,
    expected: Expectation,
    format: str,
    weight: Weight,
    wanted: Mapping[str, Tensor],
    result: _Result,
    arena: Arena,
) -> QuantizedWeight | None:
    """A converted weight as it lies on disk; None where a problem names what is wrong with it.

    Args:
        stored: what is read.
        expected: what must be there.
        format: the weight's.
        weight: which.
        wanted: what its tensors must be, byte for byte; empty where that is not known.
        result: where problems go.
        arena: whose memory to use.
    """
    files = stored.checkpoint
    encoded = expected.encoded(weight.module, format)
    places = encoded.places
    there = {n: p for n, p in places.items() if _is_as_expected(p.tensor, files, expected)}
    try:
        tensors = dict(zip(there, read_places(files, [*there.values()], arena), strict=True))
        for name, tensor in tensors.items():
            if name in wanted and (difference := compare_tensors(tensor, wanted[name])):
                result.add(name, difference)
        # What is lost, missing or misshapen was named before.
        if any(
            place.tensor in stored.lost or (name in wanted and name not in tensors)
            for name, place in places.items()
        ):
            return None
        q = encoded.decode(tensors)
    except MoequantError as error:
        result.add(weight.info.name, error)
        return None
    if tuple(q.shape) != weight.info.shape:
        result.add(
            weight.info.name, f"holds {list(q.shape)}, but the source {list(weight.info.shape)}"
        )
        return None
    return q


def _is_as_expected(name: str, stored: Checkpoint, expected: Expectation) -> bool:
    """Whether a tensor exists, with the expected dtype and shape if these are known."""
    if name not in stored.tensors:
        return False
    found = stored.tensors[name].dtype, stored.tensors[name].shape
    return expected.tensors.get(name, found) == found


def _judge(
    name: str,
    before: StoredWeight,
    q: QuantizedWeight,
    reference: QuantizedWeight | None,
    squares: tuple[float, float],
    quantizer: Quantizer,
    result: _Result,
) -> None:
    """Record the error of a weight [N, K], and check it if there is a reference."""
    signal, noise = map(math.sqrt, squares)
    least = None if reference is None else quantizer.compare(before, reference)[1]
    check = WeightCheck(
        name=name,
        format=q.format,
        signal=signal,
        noise=noise,
        effective_noise=math.sqrt(_effective_noise(before, q)) if q.format == "w4a8" else None,
        reference_noise=None if least is None else math.sqrt(least),
    )
    result.checks.append(check)
    if reason := beyond_limit(q.format, check.signal, check.noise):
        result.add(name, reason)
    if reference is not None:
        beyond = _find_out_of_bound(before, q, reference)
        if beyond is not None:
            result.add(name, beyond)
        _check_budget(check, result)


def _effective_noise(before: StoredWeight, q: QuantizedWeight) -> float:
    """Sum of squares of the difference between vLLM's effective weight and the source."""
    noise = 0.0
    for x, tile in zip(float_tiles(before), _row_tiles(q), strict=True):
        noise = sum_of_squares(x - effective_weight(tile), noise)
    return noise


def _find_out_of_bound(
    before: StoredWeight, q: QuantizedWeight, reference: QuantizedWeight
) -> OutOfBound | None:
    beyond, start = None, 0
    tiles = zip(float_tiles(before), _row_tiles(q), _row_tiles(reference), strict=True)
    for x, tile, wanted in tiles:
        found = find_out_of_bound(x, tile, wanted)
        beyond = join_out_of_bound(beyond, found, start)
        start += len(x)
    return beyond


def _row_tiles(q: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """Parts of a weight, of the rows that `float_tiles` gives."""
    return (tile for _, tile in row_tiles(q, TILE_ROWS))


def _check_budget(check: WeightCheck, result: _Result) -> None:
    # Without noise there are no decibels to lose from; the bound of every element still holds.
    if check.reference_noise and check.lost_db is not None and not check.lost_db <= MAX_LOST_DB:
        result.add(
            check.name,
            f"SQNR {check.sqnr_db:.2f} dB, {check.lost_db:.2f} dB below our quantizer's, but the "
            f"limit is {MAX_LOST_DB:g} dB",
        )


def _check_shared_scale(found: Mapping[str, QuantizedWeight], result: _Result) -> None:
    """Check that a fused set shares a global scale: engines use that of the first for all."""
    scales = {n: q.global_scale.item() for n, q in found.items() if q.global_scale is not None}
    if len(set(scales.values())) > 1:
        listed = " and ".join(f"{scale:.6g} of {name}" for name, scale in scales.items())
        result.add(next(iter(scales)), f"global scales differ within a fused set: {listed}")
