"""Plans of one checkpoint by several recipes: the given one, and those that are derived from it."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.conversion.engine_dialect import plan_for_engine
from moequant.conversion.keep_sensitive import sensitive_layers
from moequant.conversion.plan import plan_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moequant.conversion.keep_sensitive import Kept
    from moequant.conversion.plan import Plan
    from moequant.conversion.recipe import Recipe
    from moequant.conversion.sensitivity import LayerCost
    from moequant.models import Architecture
    from moequant.progress import Progress
    from moequant.statistics import InputScales, Statistics
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes plans of a checkpoint; methods raise as `make_plan`.

    Attributes:
        checkpoint: the source.
        own: architectures that a user's file or a record describes.
        input_scales: static scales of activations; None if not given.
    """

    checkpoint: Checkpoint
    own: Sequence[Architecture]
    input_scales: InputScales | None

    def plan(
        self, recipe: Recipe, statistics: Statistics | None, *, unused_statistics: bool = False
    ) -> Plan:
        """The plan by a recipe."""
        with without_collector():
            return plan_checkpoint(
                self.checkpoint,
                recipe,
                self.own,
                statistics,
                self.input_scales,
                unused_statistics=unused_statistics,
            )

    def keeping_sensitive(
        self, plan: Plan, wanted: Kept, *, workers: int, progress: Progress | None
    ) -> tuple[Plan, tuple[LayerCost, ...]]:
        """The plan that keeps the layers that cost most, and these; see `sensitive_layers`."""
        plan.check_accepted()
        kept = sensitive_layers(self.checkpoint, plan, wanted, workers=workers, progress=progress)
        recipe = plan.recipe.keeping(one.layer for one in kept)
        keeping = self.plan(recipe, plan.statistics, unused_statistics=True)
        if not keeping.needs_statistics:
            # They chose the layers, which the recipe names now, and decide nothing else.
            keeping = self.plan(recipe, None)
        return keeping, kept

    def for_engine(self, plan: Plan, engine: str) -> Plan:
        """The plan in a dialect that an engine loads; see `plan_for_engine`."""
        return plan_for_engine(plan, engine, lambda recipe: self.plan(recipe, plan.statistics))


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's garbage collector: a plan creates many objects but no garbage.

    The collector takes a tenth of the time of a small plan, and 40 % with 50 000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
