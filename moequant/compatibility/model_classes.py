"""Which class of a model config.json names, by which vLLM and SGLang choose it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from moequant.compatibility.tables import read_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TASK = (
    "(forcausallm|forconditionalgeneration|lmheadmodel|chatmodel|fortextencoding|embeddingmodel"
    "|for(sequence|token)classification|classificationmodel|forquestionanswering"
    "|forrewardmodeling|rewardmodel|model)$"
)
"""Ends of the names of classes of one model, as vLLM 0.33.0 (config/model.py:
_SUFFIX_TO_DEFAULTS) and transformers have them, in lower case."""


def classes_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """`architectures` of config.json; empty if it has no such list."""
    stated = config.get("architectures")
    return tuple(s for s in stated if isinstance(s, str)) if isinstance(stated, list) else ()


def classes_of(model_type: str) -> tuple[str, ...]:
    """The classes of a model by its `model_type`, the usual one first; empty if not known."""
    return tuple(read_table("classes.toml").get(model_type, ()))


def name_another_model(stated: Iterable[str], known: Iterable[str]) -> bool:
    """Whether no stated class is of the model; False where none is stated, or none is known."""
    found, wanted = ({*map(_model_of, names)} for names in (stated, known))
    return bool(found and wanted) and found.isdisjoint(wanted)


def name_another_task(stated: Iterable[str], known: Iterable[str]) -> bool:
    """Whether the stated classes are of the model, but none of them generates text."""
    stated, known = [*stated], [*known]
    none_is_known = {*map(_normalized, stated)}.isdisjoint(map(_normalized, known))
    return bool(stated and known) and none_is_known and not name_another_model(stated, known)


def _model_of(name: str) -> str:
    """A class's name without its task, such as qwen3moe."""
    return re.sub(_TASK, "", _normalized(name))


def _normalized(name: str) -> str:
    """A name without what engines and transformers spell differently."""
    return name.replace("_", "").lower()
