"""Module names in lists that engines match: whole blocks of experts, patterns, lookups."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moequant.dialects.regexes import compile_regex
from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_EXPERT = re.compile(r"(?P<block>.+\.experts)\.\d+\.")

ACTIVATION_SCALES = (
    "input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale",
)  # fmt: skip
"""Last names of calibrated scales of activations and of the KV cache, which no weight needs."""

REGEX = "re:"
"""What compressed-tensors writes before a regular expression."""


def expert_block(module: str) -> str | None:
    """`model.layers.3.mlp.experts` of any module in it, None of a module outside."""
    match = _EXPERT.match(module)
    return match["block"] if match else None


def is_expert(module: str) -> bool:
    """Whether a module is a single routed expert's."""
    return expert_block(module) is not None


def kept_blocks(kept: Iterable[str]) -> tuple[list[str], list[str]]:
    """Modules that are not converted, sorted, with each block of experts in one entry.

    Engines run the experts of a layer as one module, so they are kept or converted together.

    Args:
        kept: single modules, and the names of blocks whose experts are stacked.

    Returns:
        Blocks of experts, and all other modules; `lm_head` is always among these.
    """
    blocks: set[str] = set()
    others = {"lm_head"}
    for module in kept:
        block = module if module.endswith(".experts") else expert_block(module)
        (others if block is None else blocks).add(block or module)
    return sorted(blocks), sorted(others)


def block_pattern(block: str) -> str:
    """A pattern for every module in a block of experts, by whatever name an engine asks."""
    return rf"{REGEX}{re.escape(block)}\."


def target_patterns(formats: Mapping[str, str]) -> dict[str, list[str]]:
    """Patterns by which engines tell the modules of several formats apart.

    As wide as the formats allow: all children of a parent in all layers, else in one layer, else
    single modules. Children that are not converted have to be ignored by name.

    Args:
        formats: format by converted module.

    Returns:
        Patterns by format, all sorted; no module matches those of two formats.
    """
    patterns: dict[str, list[str]] = {}
    left = dict(formats)
    for widen in (_in_all_layers, _in_one_layer, str):
        matched: dict[str, dict[str, str]] = {}
        for module, format in left.items():
            matched.setdefault(widen(module), {})[module] = format
        left = {}
        for pattern, modules in matched.items():
            one, *others = dict.fromkeys(modules.values())
            if others:
                left |= modules
            else:
                patterns.setdefault(one, []).append(pattern)
    return {format: sorted(patterns[format]) for format in sorted(patterns)}


def _in_all_layers(module: str) -> str:
    return _siblings(module, fixed_numbers=0)


def _in_one_layer(module: str) -> str:
    return _siblings(module, fixed_numbers=1)


def _siblings(module: str, *, fixed_numbers: int) -> str:
    """A pattern for a module and its siblings, wherever numbers after the first ones differ."""
    parts, numbers = [], 0
    for part in module.split(".")[:-1]:
        if part.isdecimal():
            numbers += 1
            parts.append(part if numbers <= fixed_numbers else r"\d+")
        elif part == "shared_experts":
            # transformers 5.23 takes a regex with the letters "experts" for the routed ones.
            parts.append("shared_expert[s]")
        else:
            parts.append(re.escape(part))
    return REGEX + r"\.".join([*parts, "[^.]+$"])


class NamePatterns:
    """Names as compressed-tensors lists them: exact, or a regex that matches from the start."""

    def __init__(self, patterns: Sequence[str], where: str) -> None:
        """Compile `patterns`, found at `where`.

        Raises:
            CheckpointError: one is no regular expression, or could match for hours; names it.
        """
        self._exact: dict[str, int] = {}
        self._regexes: list[tuple[int, re.Pattern[str]]] = []
        for position, pattern in enumerate(patterns):
            if pattern.startswith(REGEX):
                self._regexes.append((position, _compile(pattern[len(REGEX) :], where)))
            else:
                self._exact.setdefault(pattern, position)

    def first_match(self, module: str) -> int | None:
        """Position of the first pattern that matches `module`."""
        matching = (i for i, regex in self._regexes if regex.match(module))
        found = (self._exact.get(module), next(matching, None))
        return min((i for i in found if i is not None), default=None)


class KeptModules:
    """The names in a `modules_to_not_convert`, matched as transformers does."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        """Compile `names`, found at `where`.

        Raises:
            CheckpointError: one is no regular expression, or could match for hours; names it.
        """
        # Most names hold no special character but the dot: looking those up keeps this linear.
        self._names = {name for name in names if not re.search(r"[^\w.\-]", name)}
        self._regexes = [
            _compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", where)
            for name in names
            if name not in self._names
        ]

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        return (
            any(".".join(parts[:i]) in self._names for i in ends)
            or any(".".join(parts[-i:]) in self._names for i in ends)
            or any(regex.match(module) for regex in self._regexes)
        )


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return compile_regex(pattern)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}; correct config.json") from error
