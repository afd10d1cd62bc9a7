"""The layers into which an engine merges linear layers, and by which names it looks them up."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from moequant.compatibility.tables import read_table
from moequant.dialects.engine_names import merged_in_sglang, merged_in_vllm, merged_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_MERGED_IN: dict[str, Callable[[str], str]] = {
    "vLLM": merged_in_vllm, "SGLang": merged_in_sglang,
}  # fmt: skip


class LookedUp(NamedTuple):
    """The names by which an engine finds a linear layer in lists of config.json.

    Attributes:
        own: its own name; None where only the merged layer's counts.
        merged: the name of the layer into which it is merged; None if it is not.
    """

    own: str | None
    merged: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Both, as far as there are."""
        return tuple(name for name in self if name is not None)


class MergedLayers:
    """How a model class of an engine looks up the linear layers of a checkpoint.

    Args:
        engine: "vLLM" or "SGLang".
        modules: every linear layer of the checkpoint: one that has no other part of the same merged
            layer beside it is not merged.
        classes: `architectures` of config.json.
    """

    def __init__(self, engine: str, modules: Iterable[str], classes: Collection[str]) -> None:
        self._merged_in = _MERGED_IN[engine]
        self._merged = merged_layers(modules, self._merged_in)
        known = (by_parts for name, by_parts in _classes(engine).items() if name in classes)
        self._by_parts = next(known, None)

    def of(self, module: str) -> LookedUp:
        """The names of a module, which may be in a routed expert."""
        merged = self._merged_in(module)
        if merged not in self._merged:
            return LookedUp(module, None)
        leaf = merged.rpartition(".")[2]
        by_parts = self._by_parts is None or leaf in self._by_parts
        return LookedUp(module if by_parts else None, merged)


@cache
def _classes(engine: str) -> Mapping[str, frozenset[str]]:
    """By class, the merged layers that it finds by their parts."""
    entries = [e for e in read_table("merged.toml")["class"] if e["engine"] == engine]
    return {name: frozenset(entry["by_parts"]) for entry in entries for name in entry["names"]}
