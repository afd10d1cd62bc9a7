"""How engines match the entries of Model-Optimizer's list of kept modules.

They also match parts of names and patterns, so an entry may keep more than it says. Sources: vLLM
0.33.0, `quantization/modelopt.py: is_layer_excluded` and `utils/quant_utils.py: is_layer_skipped`;
SGLang 0.5.23, `quantization/modelopt_quant.py: is_layer_excluded` and `utils.py: is_layer_skipped`.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase, translate
from typing import TYPE_CHECKING

from moequant.dialects.engine_names import in_vllm, merged_in_sglang, merged_in_vllm
from moequant.dialects.names import expert_block

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of entries that end with these, SGLang matches the end against any part of the last component.
_PARTS_IN_SGLANG = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


class KeptInVllm:
    """Which modules vLLM takes for kept because of a list."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = {
            pattern: entry for entry in entries for pattern in _widened(in_vllm(entry))
        }
        self._found: dict[str, str | None] = {}

    def entry_for(self, module: str) -> str | None:
        """The first entry by which a module of the files is kept; None if none keeps it."""
        name = in_vllm(module)
        block = expert_block(name)
        if block is None and name in self._entries:
            return self._entries[name]
        asked = block or merged_in_vllm(name)
        if asked not in self._found:
            self._found[asked] = self._search(asked, is_block=block is not None)
        return self._found[asked]

    def _search(self, asked: str, *, is_block: bool) -> str | None:
        bare = asked.removeprefix("language_model.")
        for pattern, entry in self._entries.items():
            if pattern in asked or pattern in bare or fnmatchcase(asked, pattern):
                return entry
            if is_block and "experts" in pattern and asked in pattern:
                return entry
        return None


class KeptInSglang:
    """Which modules SGLang takes for kept because of a list."""

    def __init__(self, entries: Iterable[str]) -> None:
        # Only "*" is special. `translate` makes patterns that never backtrack without end.
        self._patterns = [
            (re.compile(translate(re.sub(r"[?[]", r"[\g<0>]", entry))), entry) for entry in entries
        ]
        self._found: dict[str, str | None] = {}

    def entry_for(self, module: str) -> str | None:
        """The first entry by which a module of the files is kept; None if none keeps it."""
        block = expert_block(module)
        name = module if block is None else block
        if name not in self._found:
            self._found[name] = self._search(name, is_block=block is not None)
        return self._found[name]

    def _search(self, name: str, *, is_block: bool) -> str | None:
        asked = merged_in_sglang(name)
        # It does not merge latent attention without q_a_proj.
        leaves = {text.rpartition(".")[2] for text in (name, asked)}
        texts = (asked, asked.removeprefix("language_model."), *asked.split("."))
        for pattern, entry in self._patterns:
            # Of a merged layer, it also asks for each of the layers.
            if not is_block and f".{entry}." in f".{name}.":
                return entry
            if any(map(pattern.fullmatch, texts)):
                return entry
            tail = entry.rpartition(".")[2]
            if tail in _PARTS_IN_SGLANG and any(tail in leaf for leaf in leaves):
                return entry
        return None


def _widened(entry: str) -> list[str]:
    """The patterns that vLLM makes of an entry: of `model*`, a module and all within it."""
    if entry.endswith("*") and not entry.endswith((".*", "**")):
        return [entry[:-1], f"{entry[:-1]}.*"]
    return [entry]
