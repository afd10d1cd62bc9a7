"""Which kernels an engine runs experts with on a GPU, by kernels.toml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from moequant.compatibility.tables import fields_of, read_table

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    from_capability: tuple[int, int]
    to_capability: tuple[int, int] | None = None
    dialects: tuple[str, ...] = ()
    static: bool | None = None
    fp4_activations: bool | None = None
    refined: bool | None = None
    only: str = ""
    ran: tuple[str, ...] = ()

    def suits(self, format: str, facts: Facts, *, refined: bool) -> bool:
        """Whether it runs a format of a checkpoint, on some GPU."""
        return (
            format in self.formats
            and (not self.dialects or facts.dialect in self.dialects)
            and self.static in (None, facts.static)
            and self.fp4_activations in (None, facts.fp4_activations)
            and self.refined in (None, refined)
        )

    def describe(self, capability: tuple[int, int]) -> str:
        """Its path, what it multiplies by and is asked for with, and whether it ever ran there."""
        only = self.only and f", only with {self.only}"
        ran = "" if not self.ran or _text(capability) in self.ran else "; never run there"
        return f"{self.path} ({self.activations} activations{only}{ran})"


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
        running = [k for k in suiting if placement.is_within(k.from_capability, k.to_capability)]
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
    if any(kernel.to_capability is None for kernel in kernels):
        return f"{_text(min(kernel.from_capability for kernel in kernels))} and newer"
    ends = {(k.from_capability, k.to_capability or k.from_capability) for k in kernels}
    texts = (_text(a) if a == b else f"{_text(a)} to {_text(b)}" for a, b in sorted(ends))
    return ", ".join(texts)


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@cache
def all_kernels() -> Sequence[KernelPath]:
    """Every kernel of kernels.toml."""
    return [KernelPath(**fields_of(entry)) for entry in read_table("kernels.toml")["kernel"]]
