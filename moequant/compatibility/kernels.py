"""Which kernels an engine runs experts with on a GPU, by kernels.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pkgutil import get_data
from typing import TYPE_CHECKING, Any

from moequant.compatibility.rules import parse_capability

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.compatibility.facts import Facts, Placement
    from moequant.compatibility.rules import EngineInfo

_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class KernelPath:
    """A kernel of kernels.toml, whose head explains the fields."""

    engine: str
    formats: tuple[str, ...]
    path: str
    activations: str
    source: str
    low: tuple[int, int]
    high: tuple[int, int] | None = None
    dialects: tuple[str, ...] = ()
    static: bool | None = None
    refined: bool | None = None

    def suits(self, format: str, facts: Facts, *, refined: bool) -> bool:
        """Whether it runs a format of a checkpoint, on some GPU."""
        return (
            format in self.formats
            and (not self.dialects or facts.dialect in self.dialects)
            and self.static in (None, facts.static)
            and self.refined in (None, refined)
        )

    def describe(self) -> str:
        """Its path, and what it multiplies by."""
        return f"{self.path} ({self.activations} activations)"


def kernels_on(
    facts: Facts, engine: EngineInfo, placement: Placement
) -> tuple[dict[str, KernelPath], list[str]] | None:
    """The kernel of each format of routed experts on a GPU, and why there is none for others.

    Returns:
        None if it is not known which kernels the engine has for a format, or on which GPU.
    """
    found: dict[str, KernelPath] = {}
    lacking = []
    size = facts.intermediate
    cut = size is not None and bool(size % (_BLOCK * engine.ranks_of_an_expert(placement)))
    for format in facts.experts:
        suiting = [
            kernel
            for kernel in all_kernels()
            if kernel.engine == engine.name and kernel.suits(format, facts, refined=cut)
        ]
        if not suiting or placement.capability is None:
            return None
        running = [k for k in suiting if placement.is_within(k.low, k.high)]
        if running:
            found[format] = running[0]
        else:
            lacking.append(
                f"{engine.title} has no kernel for {format} experts on compute capability "
                f"{_text(placement.capability)}, only on {_ranges(suiting)}."
            )
    return found, lacking


def _ranges(kernels: Sequence[KernelPath]) -> str:
    """Capabilities of kernels in words; where one has no end, the others lead up to it."""
    if any(kernel.high is None for kernel in kernels):
        return f"{_text(min(kernel.low for kernel in kernels))} and newer"
    ends = {(kernel.low, kernel.high or kernel.low) for kernel in kernels}
    texts = (_text(a) if a == b else f"{_text(a)} to {_text(b)}" for a, b in sorted(ends))
    return ", ".join(texts)


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@cache
def all_kernels() -> Sequence[KernelPath]:
    """Every kernel of kernels.toml."""
    data = get_data(__name__, "kernels.toml")
    assert data is not None
    return [_read(entry) for entry in tomllib.loads(data.decode())["kernel"]]


def _read(entry: Mapping[str, Any]) -> KernelPath:
    own = {key: value for key, value in entry.items() if key not in ("from", "to")}
    lists = {key: tuple(value) for key, value in own.items() if isinstance(value, list)}
    high = parse_capability(entry["to"]) if "to" in entry else None
    return KernelPath(**{**own, **lists}, low=parse_capability(entry["from"]), high=high)
