"""The search for scales by predicted mean squares: what it needs of the source.

`search = "gaussian"` of a rule is a weighted search whose mean squares come from the weights
(`moequant.statistics.gaussian`). For gate and up that is the norm in front of the experts; for down
also gate and up of the same expert, which are read once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.conversion.predicted_inputs import PredictedInputs
from moequant.conversion.rounding import GAUSSIAN
from moequant.errors import CheckpointError, RecipeError, UnsupportedError
from moequant.models import ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moequant.conversion.units import Unit
    from moequant.models import Architecture, Model
    from moequant.weights.source_model import SourceModel
    from moequant.weights.source_weights import WeightInfo


def with_predictions(units: Iterable[Unit], source: SourceModel) -> list[Unit]:
    """The units, each that is searched by predicted mean squares with what it needs.

    Raises:
        RecipeError: such a unit is not of routed experts.
        UnsupportedError: the architecture does not say which norm is in front of them, their
            biases are not considered, or the runtime does not know their function.
        CheckpointError: the norm is missing, or not of the hidden size.
    """
    return [
        replace(unit, predicted=_predicted(unit, source))
        if unit.options.get("search") == GAUSSIAN
        else unit
        for unit in units
    ]


def predicts_uncalibrated(model: Model) -> bool:
    """Whether weights predict the inputs of routed experts in multi-token-prediction layers."""
    try:
        for layer in model.moe.optional_layers:
            model.moe.act_fn_of(layer).check()
    except UnsupportedError:
        return False
    return _unpredictable(model.architecture) is None


def _unpredictable(architecture: Architecture) -> str | None:
    """Why weights do not predict the inputs of an architecture's experts; None if they do."""
    if architecture.expert_norm is None:
        return (
            "needs the norm in front of the experts, which the description of architecture "
            f"{architecture.name!r} does not name (expert_norm)"
        )
    if architecture.stacked is not None and architecture.stacked.biased:
        return (
            f"does not consider the biases of experts, which architecture {architecture.name!r} has"
        )
    return None


def _predicted(unit: Unit, source: SourceModel) -> PredictedInputs:
    model = source.model
    architecture, role = model.architecture, model.roles[unit.name]
    if role.role != ROUTED_EXPERTS or role.layer is None or role.expert is None:
        raise RecipeError(
            f'{unit.name}: search = "{GAUSSIAN}" predicts the inputs of routed experts only, and '
            f"this is {role.role}; give it a rule with another search"
        )
    if reason := _unpredictable(architecture):
        raise UnsupportedError(
            f'{unit.name}: search = "{GAUSSIAN}" {reason}; choose another search'
        )
    assert architecture.expert_norm is not None, "or it is unpredictable"
    norm = architecture.expert_norm.tensor(role.layer)
    found, hidden = source.weights.get(norm), (model.moe.hidden,)
    if found is None or found.shape != hidden:
        shape = "missing" if found is None else f"shape {list(found.shape)}"
        raise CheckpointError(
            f"{norm}: {shape}, but must be the weight of a norm, {list(hidden)}; fetch the "
            f"checkpoint again, or {architecture.how_to_fix('`expert_norm`')}"
        )
    act_fn = model.moe.act_fn_of(role.layer)
    act_fn.check()
    before: tuple[WeightInfo, ...] = ()
    if role.projection == "down":
        others = [p for p in model.moe.projections if p != "down"]
        names = [architecture.expert_tensor(role.layer, role.expert, p) for p in others]
        before = tuple(source.weights[name] for name in names)
    offset = architecture.expert_norm.offset
    return PredictedInputs(norm=norm, offset=offset, before=before, act_fn=act_fn)
