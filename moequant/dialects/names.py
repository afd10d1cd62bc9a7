"""Module names in lists that engines match: whole blocks of experts, patterns, lookups."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from moequant.dialects.config_fields import QUANTIZATION_CONFIG, names_field
from moequant.dialects.regexes import compile_regex
from moequant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_EXPERT = re.compile(r"(?P<block>.+\.experts)\.\d+\.")

ACTIVATION_SCALES = (
    "input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale",
)  # fmt: skip
"""Last name components of calibrated scales of activations and of the KV cache."""

REGEX = "re:"
"""compressed-tensors' prefix of a regular expression."""


def expert_block(module: str) -> str | None:
    """The block of experts that a module is in, `model.layers.3.mlp.experts`; None if in none."""
    match = _EXPERT.match(module)
    return match["block"] if match else None


def is_expert(module: str) -> bool:
    """Whether a module belongs to a single routed expert."""
    return expert_block(module) is not None


def kept_blocks(kept: Iterable[str]) -> tuple[list[str], list[str]]:
    """Kept modules, sorted, with one entry for each block of experts.

    Engines run the experts of a layer as one module, so they are kept or converted together.

    Args:
        kept: single modules, and blocks of stacked experts.

    Returns:
        Blocks of experts, and all other modules, always including `lm_head`.
    """
    blocks: set[str] = set()
    others = {"lm_head"}
    for module in kept:
        block = module if module.endswith(".experts") else expert_block(module)
        (others if block is None else blocks).add(block or module)
    return sorted(blocks), sorted(others)


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Regular expressions for modules that match under any engine's prefix.

    vLLM's `WeightsMapper` renames plain names of a quantization config (`model.language_model.` to
    `language_model.model.`), but not regular expressions (its issue 28072). So the
    most common prefix, everything before `layers.3`, is left open in patterns. Prefixes of other
    modules of the same kind, such as multi-token prediction, are excluded.

    Attributes:
        main: the prefix of most modules.
        others: the other prefixes, by kind of module.
    """

    main: str
    others: Mapping[str, frozenset[str]]

    @classmethod
    def among(cls, modules: Iterable[str]) -> ModulePatterns:
        """For a checkpoint with these modules; a block of experts may represent its modules."""
        split = [_split_prefix(module) for module in modules]
        counts = Counter(prefix for prefix, rest in split if rest)
        main = max(counts, key=lambda prefix: (counts[prefix], prefix), default="")
        others: dict[str, set[str]] = {}
        for prefix, rest in split:
            if prefix != main:
                others.setdefault(_kind(rest), set()).add(prefix)
        return cls(main=main, others={kind: frozenset(found) for kind, found in others.items()})

    def of_block(self, block: str) -> str:
        """A pattern for every module in a block of experts."""
        prefix, rest = self._split(block)
        return rf"{REGEX}{prefix}{re.escape(rest)}\."

    def of_formats(self, formats: Mapping[str, str]) -> dict[str, list[str]]:
        """Patterns that distinguish the modules of several formats.

        Each pattern is as wide as possible: all children of a parent in all layers, else in one
        layer, else a single module. Children that are not converted must be ignored by name.

        Args:
            formats: format by converted module.

        Returns:
            Patterns by format, all sorted; no module matches patterns of two formats.
        """
        patterns: dict[str, list[str]] = {}
        left = dict(formats)
        all_layers = partial(self._siblings, fixed_numbers=0)
        one_layer = partial(self._siblings, fixed_numbers=1)
        for widen in (all_layers, one_layer, str):
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

    def _siblings(self, module: str, *, fixed_numbers: int) -> str:
        """A pattern for a module and its siblings, wherever numbers after the first differ."""
        prefix, rest = self._split(module)
        parts, numbers = [], 0
        for part in rest.split(".")[:-1]:
            if part.isdecimal():
                numbers += 1
                parts.append(part if numbers <= fixed_numbers else r"\d+")
            elif part == "shared_experts":
                # transformers 5.24 assumes that a regex containing "experts" means routed ones.
                parts.append("shared_expert[s]")
            else:
                parts.append(re.escape(part))
        return REGEX + prefix + r"\.".join([*parts, "[^.]+$"])

    def _split(self, module: str) -> tuple[str, str]:
        """A pattern for the prefix of a module, and the rest of its name."""
        prefix, rest = _split_prefix(module)
        if prefix != self.main or not rest:
            return "", module
        first = rest.partition(".")[0]
        others = [f"{other}{first}." for other in sorted(self.others.get(_kind(rest), ()))]
        excluded = f"(?!{'|'.join(map(re.escape, others))})" if others else ""
        return rf"{excluded}(?:.*\.)?", rest


def _split_prefix(module: str) -> tuple[str, str]:
    """Split into `model.language_model.` and `layers.3.mlp.gate`; no rest without a number."""
    parts = module.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    if first == 0:
        return module, ""
    rest = ".".join(parts[first - 1 :])
    return module.removesuffix(rest), rest


def _kind(rest: str) -> str:
    """The parent of a module, or the block of an expert, with every number replaced by 0."""
    block = rest if rest.endswith(".experts") else expert_block(rest)
    return re.sub(r"\d+", "0", block or rest.rpartition(".")[0])


class NamePatterns:
    """Names in compressed-tensors' lists: exact, or a regex that matches from the start."""

    def __init__(self, patterns: Sequence[str], where: str) -> None:
        """Compile `patterns`, found at `where`.

        Raises:
            CheckpointError: one is not a regular expression, or could match for hours.
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
    """The names in `modules_to_not_convert`, matched as transformers does."""

    def __init__(self, config: Mapping[str, Any], *fields: str) -> None:
        """Compile the names in `fields` of a `quantization_config`.

        Raises:
            CheckpointError: one is not a regular expression, or could match for hours; or a field
                is no list of names.
        """
        where = f"{QUANTIZATION_CONFIG}.{fields[0]}"
        names = [n for field in fields for n in names_field(config, field, QUANTIZATION_CONFIG)]
        # Most names have no special character except the dot; a set lookup keeps this linear.
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


def format_by_role(
    kept: KeptModules, *, experts: str, others: str, problem: str | None = None
) -> Callable[[str], str | None]:
    """As `Dialect.reader`, where routed experts have one format, and all other modules one.

    Args:
        kept: the modules that have none; the head is never quantized.
        experts: the format of routed experts.
        others: that of other modules.
        problem: why no module's format is supported; None if they are.
    """

    def format_of(module: str) -> str | None:
        if module == "lm_head" or module in kept:
            return None
        if problem is not None:
            raise UnsupportedError(f"{module}: {problem}")
        return experts if is_expert(module) else others

    return format_of


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return compile_regex(pattern)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}; correct config.json") from error
