"""Whether a benchmark's disk and memory hold what it will write, before it writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moequant.benchmarks.moe_checkpoint import HIDDEN, INTERMEDIATE
from moequant.conversion.plan import WRITE_BUFFER_BYTES
from moequant.errors import MoequantError, UnsupportedError
from moequant.formats import get_format
from moequant.storage.buffers import PAGE_BYTES
from moequant.storage.headers import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.benchmarks.moe_checkpoint import Extent

_MOUNTS = Path("/proc/self/mountinfo")

_ENTRY_BYTES = 160
"""Of a tensor in a header, at most; in an index a little less."""
_PARTS = 3
"""Tensors that a converted weight becomes, at most."""
_PLAN_BYTES = 6000
"""Memory for each tensor: measured, 1000 to write the checkpoint and 4100 to convert it."""
_PROCESS_BYTES = 400_000_000
"""Memory of a process that converts, besides: Python, torch, LLVM."""
_OTHERS_FACTOR = 3.5
"""Memory of other tools, in bytes of the checkpoint: llm-compressor 0.14 took 4.3 GB for 1.26."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a benchmark takes at most.

    Attributes:
        input_bytes: of the checkpoint, on disk as long as the benchmark runs.
        output_bytes: of the largest output, of which one is there at a time.
        memory_bytes: of the process that converts and of the one that started it.
    """

    input_bytes: int
    output_bytes: int
    memory_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Of input and output."""
        return self.input_bytes + self.output_bytes


def need_of(extent: Extent, formats: Sequence[str], *, workers: int, others: bool) -> Need:
    """What converting a checkpoint of this extent takes.

    Args:
        extent: of the checkpoint.
        formats: names of formats.
        workers: threads of a conversion.
        others: whether other tools convert it too.
    """
    shapes = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    header_bytes = extent.tensors * _ENTRY_BYTES + PAGE_BYTES
    input_bytes = extent.expert_bytes + extent.kept_bytes + header_bytes
    experts = extent.layers * extent.experts
    outputs = [
        experts * sum(s.size_bytes for n in shapes for s in get_format(f).specs(n).values())
        for f in formats
    ]
    # A header and an index.
    names_bytes = 2 * _PARTS * extent.tensors * _ENTRY_BYTES + PAGE_BYTES
    output_bytes = max(outputs) + extent.kept_bytes + names_bytes
    # Of gate and up: two bytes a weight to read, the results three times, and workspace.
    unit_bytes = 2 * INTERMEDIATE * HIDDEN * 14 + WRITE_BUFFER_BYTES
    memory_bytes = _PROCESS_BYTES + extent.tensors * _PLAN_BYTES + workers * unit_bytes
    if others:
        # What they write is theirs to choose: no more than they read.
        output_bytes = max(output_bytes, input_bytes)
        memory_bytes = max(memory_bytes, _PROCESS_BYTES + int(_OTHERS_FACTOR * input_bytes))
    return Need(input_bytes=input_bytes, output_bytes=output_bytes, memory_bytes=memory_bytes)


def check_room(extent: Extent, need: Need, folder: Path | None) -> None:
    """Refuse a checkpoint that disk, memory or the file format cannot hold.

    Args:
        extent: of the checkpoint.
        need: what converting it takes.
        folder: whose disk is written to; that of temporary files without one.

    Raises:
        MoequantError: too little disk or memory; says what is needed and what is there.
        UnsupportedError: more tensors than the header of one file can name.
    """
    place = folder or Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < need.disk_bytes:
        raise MoequantError(
            f"{place}: {_gb(free_bytes)} free, but {_gb(need.disk_bytes)} are needed: "
            f"{_gb(need.input_bytes)} for the checkpoint, and {_gb(need.output_bytes)} for the "
            "largest output; choose a smaller --size, or another disk with --folder"
        )
    held_bytes = need.memory_bytes
    held = "to convert it"
    if _is_memory(place):
        held_bytes += need.disk_bytes
        held += f", and for the files, which {place} keeps in memory"
    available_bytes = available_memory()
    if available_bytes is not None and available_bytes < held_bytes:
        raise MoequantError(
            f"{_gb(available_bytes)} of memory available, but {_gb(held_bytes)} are needed {held}; "
            "choose a smaller --size"
        )
    if extent.tensors * _ENTRY_BYTES > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{extent.tensors} tensors, but the header of the one file that is timed names at most "
            f"{MAX_HEADER_BYTES // _ENTRY_BYTES}; choose a smaller --size"
        )


def available_memory() -> int | None:
    """Bytes of memory that a new process can have without swapping; None where nobody tells."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    lines = [line.split() for line in info.read_text().splitlines()]
    free = [int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"]
    return min([*free, *_left_in_group()], default=None)


def _left_in_group() -> list[int]:
    """What a control group, such as a container's, leaves of its limit; empty without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        fields = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The page cache is in its current size too, and gives way.
        held = next(int(value) for name, value in fields if name == "anon")
    except (OSError, StopIteration, ValueError):
        return []
    return [] if limit == "max" else [int(limit) - held]


def _is_memory(place: Path) -> bool:
    """Whether the files of a folder are kept in memory."""
    if not _MOUNTS.exists():
        return False
    number = place.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    types = [line[line.index("-") + 1] for line in lines if line[2] == device]
    return any(type in ("tmpfs", "ramfs") for type in types)


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB"
