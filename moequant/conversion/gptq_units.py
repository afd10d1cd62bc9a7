"""Round the weights of a unit by GPTQ, with the second moments of their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.conversion.gptq_errors import GptqError
from moequant.device import usable_device
from moequant.formats import get_format
from moequant.quantizers.gptq import Gptq
from moequant.quantizers.gpu_columns import column_rounder
from moequant.statistics import input_of
from moequant.weights.source_weights import decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moequant.conversion.units import Unit
    from moequant.formats import QuantizedWeight, StoredWeight
    from moequant.quantizers import Quantizer
    from moequant.statistics import Statistics


def round_by_gptq(
    unit: Unit,
    weights: Sequence[StoredWeight],
    nearest: Sequence[QuantizedWeight],
    statistics: Statistics,
    quantizer: Quantizer,
    *,
    device: str = "cpu",
    written: Sequence[QuantizedWeight | None] | None = None,
) -> list[GptqError]:
    """Replace the codes of a unit's weights by those of GPTQ, in place.

    Args:
        unit: a unit with a `rounding`.
        weights: [N, K] each, as read from the source.
        nearest: the weights, rounded to nearest; their scales stay.
        statistics: of the inputs of the unit's weights.
        quantizer: rounds blocks of columns on a CPU.
        device: where to compute.
        written: for a verification, what the output holds of each weight, if it can be read. Codes
            that GPTQ may have written, up to ties (`Gptq.may_have_rounded`), are taken from it.

    Returns:
        The error of each weight, except those whose codes were taken from `written`.

    Raises:
        StatisticsError: the second moments were damaged, or are no finite numbers.
        NonFiniteError: a weight has NaN or Inf.
    """
    assert unit.rounding is not None, unit.name
    rounders: dict[str, Gptq] = {}
    errors = []
    on_cpu = device == "cpu"
    found = written or [None] * len(weights)
    for weight, w, q, other in zip(unit.weights, weights, nearest, found, strict=True):
        assert weight.expert is not None, weight.info.name
        layer, expert, projection = weight.expert
        numbers, name = decoded(w).to(device), weight.info.name
        if (what := input_of(projection)) not in rounders:
            statistics.check_hessians(layer)
            rounders[what] = Gptq(
                statistics.hessian(layer, expert, projection).to(device),
                activation_order=unit.rounding.activation_order,
                name=name,
                round_columns=quantizer.round_columns if on_cpu else None,
            )
        gptq = rounders[what]
        if other is not None and gptq.may_have_rounded(numbers, q, other, name=name):
            q.qdata.copy_(other.qdata)
            continue
        rounding = gptq.round(numbers, q.to(device), name=name)
        q.qdata.copy_(rounding.weight.qdata)
        errors.append(
            GptqError(
                format=unit.format,
                projection=projection,
                device="cpu" if on_cpu else torch.cuda.get_device_name(device),
                weights=1,
                unchanged=int(rounding.damping is None),
                nearest=rounding.error_before,
                error=rounding.error,
            )
        )
    return errors


def warnings_of_gpu(units: Iterable[Unit], device: str) -> Iterator[str]:
    """What to know of rounding these units on a CUDA device, for which kernels are compiled."""
    formats = {unit.format for unit in units if unit.rounding is not None}
    chosen = (column_rounder(get_format(f).element, usable_device(device)) for f in sorted(formats))
    for reason in dict.fromkeys(one.reason for one in chosen if one.reason is not None):
        yield (
            f"GPTQ on {device} takes 11 to 34 torch operations for each column of a weight, "
            f"many times as long as its kernel, which cannot be used: {reason}"
        )
