"""Read and quantize one unit of work, and name its tensors as the dialect does.

A weight of the source may be quantized itself. What its format and the wanted one both hold is
written without a change of any number (`moequant.formats.lossless`); all else is dequantized to
float32, which rounds nothing but scales that are no powers of two, and quantized from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.conversion.activation_scales import input_scale_of
from moequant.conversion.error_limit import check_underflow
from moequant.conversion.gptq_units import round_by_gptq
from moequant.conversion.requantization_error import RequantizationError
from moequant.conversion.rounding import quantizer_options
from moequant.conversion.weighted_search import is_weighted
from moequant.formats import QuantizedWeight, get_format, plain_weight, requantize_losslessly
from moequant.formats.base import check_values
from moequant.storage.buffers import Arena
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import decoded, read_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.conversion.gptq_errors import GptqError
    from moequant.conversion.units import Unit, Weight
    from moequant.dialects.base import Dialect
    from moequant.formats import StoredWeight
    from moequant.quantizers import Quantizer
    from moequant.statistics import Statistics
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A converted unit.

    Attributes:
        tensors: the tensors to write, by name; valid until their memory is cleared.
        requantization_errors: errors of the weights that were quantized in the source.
        gptq_errors: errors of the weights that were rounded by GPTQ.
        as_stored: whether tensors may lie in the memory they were read into.
        joined: whether tensors of a stack were joined, in memory that is not accounted for.
    """

    tensors: dict[str, Tensor]
    requantization_errors: list[RequantizationError]
    gptq_errors: Sequence[GptqError] = ()
    as_stored: bool = False
    joined: bool = False


def convert_unit(
    source: Checkpoint,
    unit: Unit,
    dialect: Dialect,
    quantizer: Quantizer,
    arena: Arena,
    results: Arena,
    statistics: Statistics | None = None,
    device: str = "cpu",
) -> Converted:
    """Read and quantize, or dequantize, a unit.

    Weights are read into `arena`; results may lie in `results`. A weighted search and GPTQ need
    `statistics`, and so may static scales of activations. GPTQ computes on `device`.

    Raises:
        StatisticsError: the statistics were damaged, or are no finite positive numbers.
        NonFiniteError: a weight has NaN or Inf, or a number that overflows the format.
        NumericsError: the format destroys a weight; see `moequant.conversion.error_limit`.
        CheckpointError: the source cannot be read.
    """
    weights = read_stored(source, [weight.info for weight in unit.weights], arena)
    lossless = _requantize_losslessly(weights, unit)
    squares = None if lossless else _mean_squares(unit, statistics, source)
    quantized = lossless or _quantize(weights, unit, quantizer, arena, results, squares)
    if lossless is None and not unit.is_plain:
        names = [weight.info.name for weight in unit.weights]
        check_underflow(
            unit.format, names, weights=weights, quantized=quantized, quantizer=quantizer
        )
    rounded: Sequence[GptqError] = ()
    if lossless is None and unit.rounding is not None:
        assert statistics is not None, "the plan refuses GPTQ without"
        rounded = round_by_gptq(unit, weights, quantized, statistics, quantizer, device=device)
    errors = _requantization_errors(unit, weights, quantized, dialect, quantizer)
    input_scale = input_scale_of(unit, statistics)
    tensors = _encode(quantized, unit, dialect, consume=True, input_scale=input_scale)
    if unit.stack is None:
        return Converted(
            tensors=tensors,
            requantization_errors=errors,
            gptq_errors=rounded,
            as_stored=lossless is not None,
        )
    stacked = {
        unit.stack.piece(suffix): unit.stack.join(
            [tensors[f"{weight.module}.{suffix}"] for weight in unit.weights]
        )
        for suffix in dialect.encoding(unit.format).suffixes
    }
    return Converted(
        tensors=stacked, requantization_errors=errors, gptq_errors=rounded, joined=True
    )


def _requantize_losslessly(
    weights: Sequence[StoredWeight], unit: Unit
) -> list[QuantizedWeight] | None:
    """The weights of a unit, requantized without loss; None if that is impossible.

    NaN is not detected, and stays NaN.
    """
    stored = [w for w in weights if isinstance(w, QuantizedWeight)]
    if not unit.lossless or len(stored) < len(weights):
        return None
    return requantize_losslessly(stored, unit.format)


def quantize_alone(
    source: Checkpoint, unit: Unit, quantizer: Quantizer, statistics: Statistics | None
) -> tuple[list[StoredWeight], list[QuantizedWeight]]:
    """The weights of a unit as read, and quantized with the nearest codes, in new memory.

    Raises as `convert_unit`.
    """
    weights = read_stored(source, [weight.info for weight in unit.weights])
    lossless = _requantize_losslessly(weights, unit)
    squares = None if lossless else _mean_squares(unit, statistics, source)
    return weights, lossless or _quantize(weights, unit, quantizer, Arena(), Arena(), squares)


def convert_again(
    source: Checkpoint,
    weights: Sequence[StoredWeight],
    unit: Unit,
    dialect: Dialect,
    *,
    quantizer: Quantizer,
    arena: Arena,
    statistics: Statistics | None = None,
    written: Sequence[QuantizedWeight | None] | None = None,
) -> dict[str, Tensor]:
    """The tensors of `convert_unit` for weights already read from `source`, as single weights.

    They are in new memory; `arena` is for temporaries. `written` is for units that GPTQ rounds, as
    in `round_by_gptq`.

    Raises:
        StatisticsError: as `convert_unit`.
        NonFiniteError: a weight has NaN or Inf.
    """
    lossless = _requantize_losslessly(weights, unit)
    squares = None if lossless else _mean_squares(unit, statistics, source)
    quantized = lossless or _quantize(weights, unit, quantizer, arena, Arena(), squares)
    if lossless is None and unit.rounding is not None:
        assert statistics is not None, "the plan refuses GPTQ without"
        round_by_gptq(unit, weights, quantized, statistics, quantizer, written=written)
    # After a lossless requantization, results may share memory with `weights`, which stay in use.
    return _encode(
        quantized,
        unit,
        dialect,
        consume=lossless is None,
        input_scale=input_scale_of(unit, statistics),
    )


def _quantize(
    weights: Sequence[StoredWeight],
    unit: Unit,
    quantizer: Quantizer,
    arena: Arena,
    results: Arena,
    mean_squares: list[Tensor] | None,
) -> list[QuantizedWeight]:
    format, names = get_format(unit.format), [weight.info.name for weight in unit.weights]
    if format.is_plain:
        return [
            plain_weight(quantizer.decode(q, format.qdata_dtype, name=name, empty=results.empty))
            for q, name in zip(weights, names, strict=True)
            if isinstance(q, QuantizedWeight)
        ]
    return quantizer.quantize_fused(
        format,
        weights,
        quantizer_options(unit.options),
        names=names,
        empty=results.empty,
        scratch=arena.empty,
        mean_squares=mean_squares,
    )


def _mean_squares(
    unit: Unit, statistics: Statistics | None, source: Checkpoint
) -> list[Tensor] | None:
    """The mean squares of the input channels of a unit's weights; None if it needs none."""
    if unit.predicted is not None:
        return [unit.predicted.mean_square(source)] * len(unit.weights)
    if not is_weighted(unit):
        return None
    assert statistics is not None, "the plan refuses a weighted search without"
    places = [weight.expert for weight in unit.weights]
    return [statistics.input_mean_square(*place) for place in places if place is not None]


def _encode(
    quantized: Sequence[QuantizedWeight],
    unit: Unit,
    dialect: Dialect,
    *,
    consume: bool,
    input_scale: Tensor | None,
) -> dict[str, Tensor]:
    """Tensors of a unit under the dialect's names for single weights, in the weights' order.

    With `consume` they may reuse the memory of `quantized`, which is invalid afterwards.
    """
    tensors: dict[str, Tensor] = {}
    for weight, q in zip(unit.weights, quantized, strict=True):
        tensors |= dialect.to_disk(weight.module, q, consume=consume, input_scale=input_scale)
    return tensors


def requantization_error(
    weight: Weight,
    before: QuantizedWeight,
    after: QuantizedWeight,
    *,
    dialect: Dialect,
    squares: tuple[float, float],
) -> RequantizationError:
    """The requantization error of a weight: `before` is read from the source, `after` the output.

    `squares` is the result of `Quantizer.compare` for the two; `dialect` is the output's.
    """
    assert isinstance(weight.info, EncodedInfo), weight.info.name
    signal, noise = squares
    error = RequantizationError(
        role=weight.role,
        source=before.format,
        format=after.format,
        weights=1,
        exact=int(noise == 0),
        signal=signal,
        noise=noise,
    )
    # In a dialect that stores a reciprocal, the numbers on disk differ slightly from these.
    return error.scaled(dialect.stored_ratio(after) / weight.info.dialect.stored_ratio(before))


def _requantization_errors(
    unit: Unit,
    stored: Sequence[StoredWeight],
    written: Sequence[QuantizedWeight],
    dialect: Dialect,
    quantizer: Quantizer,
) -> list[RequantizationError]:
    """The requantization errors of the weights that were quantized in the source.

    Raises:
        NonFiniteError: a weight has NaN or Inf.
    """
    errors = []
    for weight, before, q in zip(unit.weights, stored, written, strict=True):
        if isinstance(before, QuantizedWeight):
            after = dialect.as_read(q)
            squares = quantizer.compare(before, after)
            if not math.isfinite(squares[0]):
                check_values(decoded(before), weight.info.name)
            errors.append(
                requantization_error(weight, before, after, dialect=dialect, squares=squares)
            )
    return errors
