"""Which layers cost a model most when their experts are quantized, by statistics.

The experts of a layer add their outputs to the residual stream, so an error there counts against
what the stream has become. The cost of layer L is

    (error of gate + error of up + error of down) * energy(L) / (energy(0) + ... + energy(L))

where the error of a projection is its relative squared error, sum of t * d**2 * s over sum of
t * w**2 * s, over experts, rows and columns: w the weight, d its error under the plan's format and
options with the nearest codes, s the mean square of the input channel, t the tokens that the expert
saw. Energy is the second of these sums for down: the squared output of the layer's experts, for
independent channels and router weights of 1. Attention, shared experts and layers that are not
calibrated are not counted.

At most EXPERTS of a layer are quantized for this: those that saw most tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from moequant.conversion.quantize_unit import quantize_alone
from moequant.formats import dequantize, float_tiles, row_tiles
from moequant.formats.squares import TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Executor

    from moequant.conversion.plan import Plan
    from moequant.conversion.units import Unit
    from moequant.progress import Progress
    from moequant.quantizers import Quantizer
    from moequant.statistics import Statistics
    from moequant.storage.checkpoint import Checkpoint

EXPERTS = 8


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What quantizing the experts of a layer costs.

    Attributes:
        layer: its index.
        cost: as above.
        extra_bytes: by how much the output grows if they are kept.
    """

    layer: int
    cost: float
    extra_bytes: int


def layer_costs(
    source: Checkpoint,
    plan: Plan,
    statistics: Statistics,
    quantizer: Quantizer,
    *,
    pool: Executor,
    progress: Progress,
) -> list[LayerCost]:
    """The cost of each layer whose experts the plan quantizes, and which was calibrated, in order.

    Raises:
        StatisticsError: the statistics were damaged.
        NonFiniteError: a weight has NaN or Inf.
        CheckpointError: the source cannot be read.
    """
    layers: dict[int, list[Unit]] = {}
    for unit in plan.units:
        place = unit.weights[0].expert
        if place is not None and place[0] in statistics.layers:
            layers.setdefault(place[0], []).append(unit)
    ordered = sorted(layers)
    sampled = {layer: _sample(layers[layer], layer, statistics) for layer in ordered}
    progress.start("comparing layers", sum(u.source_bytes for of in sampled.values() for u in of))

    def measure(unit: Unit) -> list[tuple[str, float, float]]:
        found = _errors(source, unit, statistics, quantizer)
        progress.advance(unit.source_bytes, unit.name)
        return found

    costs, stream = [], 0.0
    # Layer after layer, because statistics of few layers are in memory.
    for layer in ordered:
        sums: dict[str, tuple[float, float]] = {}
        for projection, error, signal in chain.from_iterable(pool.map(measure, sampled[layer])):
            before = sums.get(projection, (0.0, 0.0))
            sums[projection] = (before[0] + error, before[1] + signal)
        energy = sums.get("down", (0.0, 0.0))[1]
        stream += energy
        relative = sum(error / signal for error, signal in sums.values() if signal > 0)
        growth = sum(unit.source_bytes - unit.result_bytes for unit in layers[layer])
        share = energy / stream if stream > 0 else 0.0
        costs.append(LayerCost(layer=layer, cost=relative * share, extra_bytes=growth))
    progress.finish()
    return costs


def most_costly(
    costs: Iterable[LayerCost], *, count: int | None, extra_bytes: int | None
) -> list[LayerCost]:
    """Those that cost most, the first most, of equals the first layer.

    Args:
        costs: of all layers.
        count: how many, or None.
        extra_bytes: instead: how much the output may grow; a layer that does not fit is left out.
    """
    ordered = sorted(costs, key=lambda one: (-one.cost, one.layer))
    if count is not None:
        return ordered[:count]
    chosen, left = [], extra_bytes or 0
    for one in ordered:
        if one.extra_bytes <= left:
            chosen.append(one)
            left -= one.extra_bytes
    return chosen


def _sample(units: Sequence[Unit], layer: int, statistics: Statistics) -> list[Unit]:
    """The units of the experts of a layer that saw most tokens, in order."""
    experts = sorted({w.expert[1] for u in units for w in u.weights if w.expert is not None})
    seen = {expert: statistics.tokens(layer, expert) for expert in experts}
    chosen = {e for e in sorted(experts, key=lambda e: (-seen[e], e))[:EXPERTS] if seen[e]}
    places = ((unit, unit.weights[0].expert) for unit in units)
    return [unit for unit, place in places if place is not None and place[1] in chosen]


def _errors(
    source: Checkpoint, unit: Unit, statistics: Statistics, quantizer: Quantizer
) -> list[tuple[str, float, float]]:
    """Projection, squared error and squared signal of each weight of a unit, by its tokens."""
    found = []
    weights, quantized = quantize_alone(source, unit, quantizer, statistics)
    for weight, stored, q in zip(unit.weights, weights, quantized, strict=True):
        assert weight.expert is not None, weight.info.name
        layer, expert, projection = weight.expert
        square = statistics.input_mean_square(layer, expert, projection).double()
        error, signal = torch.zeros_like(square), torch.zeros_like(square)
        # Rows at a time, so that the pass needs no more memory than the conversion.
        for x, (_, tile) in zip(float_tiles(stored), row_tiles(q, TILE_ROWS), strict=True):
            error += (dequantize(tile) - x).square_().sum(0, dtype=torch.float64)
            signal += x.square().sum(0, dtype=torch.float64)
        tokens = statistics.tokens(layer, expert)
        found.append((projection, tokens * float(error @ square), tokens * float(signal @ square)))
    return found
