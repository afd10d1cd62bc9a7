"""The settings of a conversion, as plan.json and moequant.json have them, and how two differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moequant._version import __version__
from moequant.storage.documents import object_at
from moequant.storage.setting_differences import setting_differences
from moequant.units import first_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.conversion.plan import Plan

_SHOWN = 5


def settings_of(plan: Plan) -> dict[str, Any]:
    """What decides the bytes of an output beside its source, by the keys of moequant.json."""
    digests = {"statistics": plan.statistics, "activation_scales": plan.input_scales}
    settings = {
        "moequant": __version__,
        "recipe": plan.recipe.model_dump(mode="json"),
        "dialect": plan.dialect.name,
        "architecture_definition": plan.model.architecture.definition,
        **{key: {"sha256": used.digest} for key, used in digests.items() if used is not None},
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))  # as it is read again
    return plain


def differing_settings(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings in which a plan.json or moequant.json differs, in words; empty if in none."""
    before, now = _compared(recorded), _compared(settings)
    # What the record of an earlier moequant does not say is not known to differ.
    return first_of([*setting_differences(before, {key: now[key] for key in before})], _SHOWN)


def _compared(document: Mapping[str, Any]) -> dict[str, Any]:
    """What decides bytes: not a recipe's summary, nor what statistics say of their data."""
    recipe = document.get("recipe")
    if isinstance(recipe, dict):
        recipe = {key: value for key, value in recipe.items() if key != "summary"}
    stated = ("moequant", "dialect", "architecture_definition")
    return {
        "recipe": recipe,
        **{key: document[key] for key in stated if key in document},
        "statistics": {"sha256": object_at(document, "statistics").get("sha256")},
        "activation_scales": {"sha256": object_at(document, "activation_scales").get("sha256")},
    }
