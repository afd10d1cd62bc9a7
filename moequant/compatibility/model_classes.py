"""Which class of a model config.json names, by which vLLM and SGLang choose it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.compatibility.tables import read_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def classes_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """`architectures` of config.json; empty if it has no such list."""
    stated = config.get("architectures")
    return tuple(s for s in stated if isinstance(s, str)) if isinstance(stated, list) else ()


def classes_of(model_type: str) -> tuple[str, ...]:
    """The classes of a model by its `model_type`, the usual one first; empty if not known."""
    return tuple(read_table("classes.toml").get(model_type, ()))


def are_others(stated: Iterable[str], known: Iterable[str]) -> bool:
    """Whether none of the stated classes is known; False where none is stated, or none is known."""
    found, wanted = _plain(stated), _plain(known)
    return bool(found and wanted) and found.isdisjoint(wanted)


def _plain(names: Iterable[str]) -> set[str]:
    """Names without what engines and transformers spell differently."""
    return {name.replace("_", "").lower() for name in names}
