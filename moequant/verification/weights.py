"""Compare every tensor of a converted checkpoint with its source.

Copied tensors must equal the source's, byte for byte. Converted tensors are converted again if the
record says how, and must have the same bytes. If another tool made them, every element must be
within the bound of `moequant.verification.bounds`, and the SQNR of every weight within a limit. In
both cases the error on disk is measured. A worker holds one unit in memory, and reads source and
result once; results of GPTQ twice, before it rounds and to compare them.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

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
    check_static_scale,
    effective_weight,
    float_tiles,
    get_format,
    row_tiles,
    sum_of_squares,
)
from moequant.formats.squares import TILE_ROWS
from moequant.storage.buffers import Arena, tensor_bytes
from moequant.verification.bounds import MAX_LOST_DB, find_out_of_bound
from moequant.verification.differences import compare_tensors, find_difference
from moequant.verification.findings import WeightChecks
from moequant.verification.report import Problem, WeightCheck
from moequant.weights.converted import read_input_scales
from moequant.weights.encoded import read_places
from moequant.weights.finite import find_not_finite
from moequant.weights.source_weights import check_bias, read_stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.conversion import Weight
    from moequant.formats import StoredWeight
    from moequant.quantizers import Quantizer
    from moequant.storage.headers import TensorInfo
    from moequant.verification.expectation import Verification


_CHUNK_BYTES = 8 << 20
"""Bytes of a copied tensor that are compared at once."""


@dataclass
class _Result:
    """What the comparison of one tensor or unit found."""

    problems: list[Problem] = field(default_factory=list)
    checks: list[WeightCheck] = field(default_factory=list)
    requantization_errors: list[RequantizationError] = field(default_factory=list)
    not_finite: str | None = None
    """Of a copied tensor, its first NaN or Inf, in words."""

    def add(self, name: str, message: object) -> None:
        self.problems.append(Problem(check="weights", name=name, message=str(message)))


def check_weights(run: Verification, quantizer: Quantizer) -> WeightChecks:
    """Compare every tensor, except those that `check_structure` found missing or misshapen.

    Args:
        run: what is verified.
        quantizer: converts the source's weights again.

    Returns:
        The errors of converted weights.

    Raises:
        CheckpointError: a file cannot be read or changes meanwhile, or a weight that is converted
            holds NaN or Inf.
    """
    expected, progress = run.expected, run.progress
    comparison = _Comparison(run, quantizer)
    own, biases = threading.local(), expected.biases()
    whereabouts = expected.model.whereabouts

    def check(item: Unit | TensorInfo) -> _Result:
        result = _Result()
        if not isinstance(item, Unit):
            if item.name in biases:
                check_bias(run.source, item)
            comparison.check_copy(item, result)
            progress.advance(item.size_bytes, whereabouts(item.name))
            return result
        if item.is_plain:
            comparison.check_dequantized(item, result)
        else:
            arena = own.__dict__.setdefault("arena", Arena(quantizer.allocate))
            comparison.check_quantized(item, arena, result)
            arena.clear()
        progress.advance(item.source_bytes, whereabouts(item.name))
        return result

    checks = WeightChecks(expected.model.roles)
    progress.start("weights", sum(info.size_bytes for info in run.source.tensors.values()))
    for result in run.pool.map(check, (*expected.copies, *expected.items)):
        run.findings.extend(result.problems)
        for weight in result.checks:
            checks.add(weight)
        checks.add_requantization_errors(result.requantization_errors)
        if result.not_finite is not None:
            checks.not_finite.append(result.not_finite)
    progress.finish()
    return checks


@dataclass(frozen=True)
class _Comparison:
    """Compares tensors and units; each method adds what it finds to a result."""

    run: Verification
    quantizer: Quantizer

    def check_copy(self, info: TensorInfo, result: _Result) -> None:
        """Compare a tensor that is copied."""
        if self._is_stored(info.name, info.dtype, info.shape):
            found = self.run.stored.checkpoint.chunks(info.name, _CHUNK_BYTES)
            wanted = self._read_through(info, result)
            difference = find_difference(zip(found, wanted, strict=True), info.dtype, info.shape)
            if difference is not None:
                result.add(info.name, difference)

    def _read_through(self, info: TensorInfo, result: _Result) -> Iterator[memoryview]:
        """The source's bytes of a tensor that is copied; notes the first NaN or Inf."""
        offset = 0
        for chunk in self.run.source.chunks(info.name, _CHUNK_BYTES):
            if result.not_finite is None:
                # Copied, because torch takes no memory that it may not write.
                part = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
                result.not_finite = find_not_finite(part, info, offset)
            offset += chunk.nbytes
            yield chunk

    def check_dequantized(self, unit: Unit, result: _Result) -> None:
        """Compare a dequantized unit: the source's numbers, rounded to the plain format."""
        dialect = self.run.expected.dialect
        # It is one weight, or one expert's part of a stack.
        ((name, dtype, shape),) = unit_outputs(unit, dialect)
        is_stored = self._is_stored(name, dtype, shape)
        errors: list[RequantizationError] = []

        def pairs() -> Iterator[tuple[memoryview, memoryview]]:
            for number, tile in enumerate(unit.tiles):
                converted = convert_unit(
                    self.run.source, tile, dialect, self.quantizer, Arena(), Arena()
                )
                errors.extend(converted.requantization_errors)
                (wanted,) = converted.tensors.values()
                position, height = number, len(wanted)
                if unit.stack is not None:
                    position, height = unit.stack.expert, height if unit.stack.flat else 1
                if is_stored:
                    rows = slice(position * height, (position + 1) * height)
                    found = self.run.stored.checkpoint.read(name, rows)
                    yield tensor_bytes(found), tensor_bytes(wanted)

        if unit.stack is not None:
            shape = unit.stack.shape_of_one(shape)
        if difference := find_difference(pairs(), dtype, shape):
            result.add(unit.first_tensor(dialect), difference)
        result.requantization_errors += [error_of_tiles(errors)] if len(unit.tiles) > 1 else errors

    def check_quantized(self, unit: Unit, arena: Arena, result: _Result) -> None:
        """Convert a unit again, in the memory of `arena`, and compare."""
        dialect, quantizer = self.run.expected.dialect, self.quantizer
        weights = read_stored(self.run.source, [weight.info for weight in unit.weights], arena)
        wanted: Mapping[str, Tensor] = {}
        references: Sequence[QuantizedWeight | None] = [None] * len(weights)
        if self.run.expected.plan is None:
            names = [weight.info.name for weight in unit.weights]
            references = quantizer.quantize_fused(
                get_format(unit.format), weights, unit.options, names=names, empty=arena.empty
            )
        else:
            written = None
            if unit.rounding is not None:
                # What is wrong with them is told below.
                written = [
                    self._read(weight, unit.format, {}, arena, _Result()) for weight in unit.weights
                ]
            wanted = convert_again(
                self.run.source,
                weights,
                unit,
                dialect,
                quantizer=quantizer,
                arena=arena,
                statistics=self.run.expected.plan.statistics,
                written=written,
            )
        scales = {}
        for weight, before, reference in zip(unit.weights, weights, references, strict=True):
            q = self._read(weight, unit.format, wanted, arena, result)
            if q is None:
                continue
            if q.global_scale is not None:
                scales[weight.info.name] = q.global_scale.item()
            if weight.module in self.run.expected.static:
                self._check_input_scale(weight.module, unit.format, wanted, result)
            squares = quantizer.compare(before, q)
            name, is_nearest = weight.info.name, unit.rounding is None
            self._judge(name, before, q, reference, squares, result, is_nearest=is_nearest)
            if isinstance(before, QuantizedWeight):
                error = requantization_error(weight, before, q, dialect=dialect, squares=squares)
                result.requantization_errors.append(error)
        # Engines use the global scale of the first weight of a fused set for all of them.
        if self.run.expected.plan is None and len(set(scales.values())) > 1:
            listed = " and ".join(f"{scale:.6g} of {name}" for name, scale in scales.items())
            result.add(next(iter(scales)), f"global scales differ within a fused set: {listed}")

    def _check_input_scale(
        self, module: str, format: str, wanted: Mapping[str, Tensor], result: _Result
    ) -> None:
        """Compare the static scale of a weight's input, or where none is known, check it."""
        dialect, files = self.run.expected.dialect, self.run.stored.checkpoint
        (name,) = dialect.input_scale_specs(module, format)
        try:
            if name not in wanted:
                scales = read_input_scales(files, dialect, [module], format)
                check_static_scale(scales.item(), name)
            elif self._is_stored(name, *self.run.expected.tensors[name]) and (
                difference := compare_tensors(files.read(name), wanted[name])
            ):
                result.add(name, difference)
        except MoequantError as error:
            result.add(name, str(error).removeprefix(f"{name}: "))

    def _is_stored(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor has this dtype and shape; if not, `check_structure` reported it."""
        info = self.run.stored.checkpoint.tensors.get(name)
        return info is not None and (info.dtype, info.shape) == (dtype, shape)

    def _read(
        self,
        weight: Weight,
        format: str,
        wanted: Mapping[str, Tensor],
        arena: Arena,
        result: _Result,
    ) -> QuantizedWeight | None:
        """Read a converted weight; None where a problem names what is wrong with it.

        Its tensors are compared with those `wanted`, where these are known.
        """
        files, expected = self.run.stored.checkpoint, self.run.expected
        places = expected.places(weight.module, format)
        there = {
            name: place
            for name, place in places.items()
            if (info := files.tensors.get(place.tensor))
            and (info.dtype, info.shape)
            == expected.tensors.get(info.name, (info.dtype, info.shape))
        }
        try:
            tensors = dict(zip(there, read_places(files, [*there.values()], arena), strict=True))
            for name, tensor in tensors.items():
                if name in wanted and (difference := compare_tensors(tensor, wanted[name])):
                    result.add(name, difference)
            # Tensors that are lost, missing or misshapen were reported before.
            if any(
                place.tensor in self.run.stored.lost or (name in wanted and name not in tensors)
                for name, place in places.items()
            ):
                return None
            q = expected.dialect.from_disk(weight.module, format, tensors)
        except MoequantError as error:
            result.add(weight.info.name, error)
            return None
        if tuple(q.shape) != weight.info.shape:
            result.add(
                weight.info.name, f"holds {list(q.shape)}, but the source {list(weight.info.shape)}"
            )
            return None
        return q

    def _judge(
        self,
        name: str,
        before: StoredWeight,
        q: QuantizedWeight,
        reference: QuantizedWeight | None,
        squares: tuple[float, float],
        result: _Result,
        *,
        is_nearest: bool,
    ) -> None:
        """Record the error of a weight [N, K], and check it if there is a reference."""
        signal, noise = map(math.sqrt, squares)
        least = None if reference is None else self.quantizer.compare(before, reference)[1]
        check = WeightCheck(
            name=name,
            format=q.format,
            signal=signal,
            noise=noise,
            effective_noise=_effective_noise(before, q) if q.format == "w4a8" else None,
            reference_noise=None if least is None else math.sqrt(least),
        )
        result.checks.append(check)
        # GPTQ may move the error of a weight far into columns whose inputs are small.
        if is_nearest and (reason := beyond_limit(q.format, signal, noise)):
            result.add(
                name,
                f"{reason}. Its codes or scales are not those of the source, or the format cannot "
                "hold it: quantize again from the source",
            )
        if reference is None:
            return
        beyond, row = None, 0
        tiles = zip(float_tiles(before), _row_tiles(q), _row_tiles(reference), strict=True)
        for x, tile, best in tiles:
            beyond = find_out_of_bound(x, tile, best, first_row=row, before=beyond)
            row += len(x)
        if beyond is not None:
            result.add(name, beyond)
        # A reference without noise has no SQNR to compare with; the bound of elements still holds.
        if check.reference_noise and check.lost_db is not None and not check.lost_db <= MAX_LOST_DB:
            result.add(
                name,
                f"SQNR {check.sqnr_db:.2f} dB, {check.lost_db:.2f} dB below our quantizer's, but "
                f"the limit is {MAX_LOST_DB:g} dB",
            )


def _effective_noise(before: StoredWeight, q: QuantizedWeight) -> float:
    """Norm of the difference between vLLM's effective weight and the source."""
    noise = 0.0
    for x, tile in zip(float_tiles(before), _row_tiles(q), strict=True):
        noise = sum_of_squares(x - effective_weight(tile), noise)
    return math.sqrt(noise)


def _row_tiles(q: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """Parts of a weight, of the rows that `float_tiles` gives."""
    return (tile for _, tile in row_tiles(q, TILE_ROWS))
