"""The dialect in which an engine loads the output, where it does not load the default one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.compatibility import ENGINES
from moequant.compatibility.rules import failures_of_model
from moequant.conversion.output_dialect import serving_dialects
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.compatibility import Verdict
    from moequant.conversion.plan import Plan
    from moequant.conversion.recipe import Recipe


def plan_for_engine(plan: Plan, engine: str, plan_by: Callable[[Recipe], Plan]) -> Plan:
    """The plan, or else one in the first dialect that an engine loads, which its warnings name.

    Args:
        plan: in the dialect of the recipe, or the default one.
        engine: a key of ENGINES other than moequant's own.
        plan_by: makes the plan again, by another recipe.

    Raises:
        UnsupportedError: the engine is not known to load the output in any dialect, or not in the
            one that the recipe names; or not the model, whatever its format.
    """
    verdict = _verdict(plan, engine)
    if plan.refusals or verdict is None or verdict.loads:
        return plan
    title = ENGINES[engine].title
    if failures := failures_of_model(verdict):
        raise UnsupportedError(
            f"{title} does not load this model in any format: {' '.join(failures)} Or leave out "
            "--for (engine=)"
        )
    formats = dict.fromkeys(unit.format for unit in plan.units)
    why = " ".join(verdict.why) or f"No rule says that {title} loads it."
    if plan.recipe.output.dialect is not None:
        raise UnsupportedError(
            f"the dialect {plan.dialect.name}, for {title}: {why} Leave the dialect out, or --for "
            "(engine=)"
        )
    for dialect in serving_dialects(plan.model.architecture):
        if dialect is plan.dialect or not {*formats} <= {*dialect.carried}:
            continue
        try:
            other = plan_by(plan.recipe.with_output(dialect=dialect.name, max_shard_size=None))
        except UnsupportedError:
            continue  # the dialect does not hold this mixture
        found = _verdict(other, engine)
        if not other.refusals and found is not None and found.loads:
            said = f"written in the dialect {dialect.name} for {title}, and not in "
            said += f"{plan.dialect.name}: {why}"
            return replace(other, warnings=(said, *other.warnings))
    raise UnsupportedError(
        f"{title} is not known to load {', '.join(formats)} of this model in any dialect. In "
        f"{plan.dialect.name}: {why} Choose another format, or leave out --for (engine=)"
    )


def _verdict(plan: Plan, engine: str) -> Verdict | None:
    """The verdict of an engine; None if nothing is quantized."""
    name = ENGINES[engine].name
    return next((v for v in plan.engines if v.engine == name), None)
