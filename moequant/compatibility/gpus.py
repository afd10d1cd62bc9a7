"""GPUs by name, with compute capability and memory, by gpus.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.compatibility.tables import fields_of, read_table
from moequant.errors import UnsupportedError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_GB = 10**9
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of gpus.toml, whose head explains the fields."""

    name: str
    capability: tuple[int, int]
    memory_gb: int
    source: str
    shared: bool = False
    read: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """The memory that it has at least: what its maker states, in decimal units."""
        return self.memory_gb * _GB

    @property
    def most_memory_bytes(self) -> int:
        """The memory that it has at most: what its maker states, in binary units."""
        return self.memory_gb * _GIB


def find_gpu(name: str) -> Gpu:
    """The GPU that a user means, in any spelling, such as "RTX PRO 6000".

    Raises:
        UnsupportedError: none is, or there is nothing to say of it; says why.
    """
    wanted = _plain(name)
    for gpu in GPUS.values():
        if wanted in map(_plain, (gpu.name, *gpu.aliases)):
            return gpu
    for entry in _TABLE["refused"]:
        if wanted in entry["names"]:
            raise UnsupportedError(
                f"{name}: {entry['reason']}. Without a GPU, `check` says what holds for any; "
                f"known GPUs: {', '.join(GPUS)}"
            )
    raise UnsupportedError(unknown_name("GPU", name, GPUS))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce", "", name.lower())


_TABLE = read_table("gpus.toml")
GPUS: Mapping[str, Gpu] = {entry["name"]: Gpu(**fields_of(entry)) for entry in _TABLE["gpu"]}
"""By name, in the order of compute capability."""
