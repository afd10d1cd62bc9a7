"""Which layers stay as they are, because quantizing their experts costs a model most."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moequant.conversion.recipe import parse_size
from moequant.conversion.sensitivity import LayerCost, layer_costs, most_costly
from moequant.errors import RecipeError, UnsupportedError
from moequant.progress import SilentProgress
from moequant.quantizers import choose_quantizer
from moequant.quantizers.worker_pool import worker_pool

if TYPE_CHECKING:
    from moequant.conversion.plan import Plan
    from moequant.progress import Progress
    from moequant.statistics import Statistics
    from moequant.storage.checkpoint import Checkpoint

_OPTION = "--keep-sensitive (keep_sensitive=)"


class Kept(NamedTuple):
    """How much is kept: a number of layers, or the bytes by which the output may grow.

    Attributes:
        text: as it was given.
        layers: how many layers; None for a size.
        extra_bytes: the size; None for a number of layers.
    """

    text: str
    layers: int | None
    extra_bytes: int | None


def parse_kept(given: str | int, statistics: Statistics | None) -> Kept:
    """What `keep_sensitive` asks for.

    Raises:
        RecipeError: it is neither a number of layers nor a size, or there are no statistics.
    """
    text = str(given).strip()
    if statistics is None:
        raise RecipeError(
            f"{_OPTION} {text!r} needs statistics: measure them with `moequant calibrate`, "
            "and give the file with --statistics"
        )
    if text.isdecimal() and int(text) > 0:
        return Kept(text, int(text), None)
    try:
        return Kept(text, None, parse_size(text))
    except ValueError:
        raise RecipeError(
            f"{_OPTION} {text!r} is neither a number of layers above zero nor a size; give "
            "one, such as 2 or 500MB"
        ) from None


def sensitive_layers(
    checkpoint: Checkpoint,
    plan: Plan,
    wanted: Kept,
    *,
    workers: int,
    progress: Progress | None,
) -> tuple[LayerCost, ...]:
    """The layers whose experts are kept, those that cost most first; the plan has statistics.

    Raises:
        RecipeError: nothing would be kept, or nothing converted.
        UnsupportedError: only the headers of the source are here.
    """
    assert plan.statistics is not None
    if not checkpoint.is_local:
        raise UnsupportedError(
            f"{checkpoint.path}: keep_sensitive reads weights, and only their headers are here; "
            "download the source first"
        )
    with worker_pool(workers) as pool:
        costs = layer_costs(
            checkpoint,
            plan,
            plan.statistics,
            choose_quantizer(plan.jobs()).quantizer,
            pool=pool,
            progress=progress or SilentProgress(),
        )
    if len(costs) < 2:
        raise RecipeError(
            f"{_OPTION} {wanted.text!r} chooses among calibrated layers that the recipe "
            f"converts, but there are {len(costs)}; leave it out"
        )
    kept = tuple(most_costly(costs, count=wanted.layers, extra_bytes=wanted.extra_bytes))
    if not kept or len(kept) == len(costs):
        least = min(one.extra_bytes for one in costs)
        raise RecipeError(
            f"{_OPTION} {wanted.text!r} keeps {len(kept)} of the {len(costs)} calibrated "
            f"layers that the recipe converts; give a number from 1 to {len(costs) - 1}, or a size "
            f"of at least {least} bytes, that of a layer"
        )
    return kept
