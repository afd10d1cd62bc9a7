"""Time conversions on a CPU, and compare with a floor and other tools.

The floor is a plain read of the source's weight files through one buffer, and a plain write of as
many bytes as the output has, fsynced: one thread, nothing computed. It is measured in turn with the
conversions, on the same files and the same disk. Other work on the machine only adds time, so every
figure is the smallest of its rounds; the document has the rounds, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moequant._version import __version__
from moequant.benchmarks.machine import processor_name
from moequant.benchmarks.one_conversion import TOOLS
from moequant.benchmarks.random_checkpoint import write_bench_checkpoint
from moequant.conversion import convert
from moequant.cores import available_cores
from moequant.errors import ArgumentError, MoequantError, UnsupportedError, unknown_name
from moequant.formats import get_format
from moequant.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_BUFFER_BYTES = 1 << 20
_OURS = "moequant"
_FLOORS_A_ROUND = 3
"""The floor takes a fraction of a conversion's time, and everything is compared with it."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The checkpoint that is converted, and number and size of its experts' weights.

    `format` is the format of its experts; None for BF16.
    """

    path: Path
    format: str | None
    weights: int
    expert_bytes: int


def bench_conversion(
    formats: Sequence[str],
    *,
    size_bytes: int,
    workers: int,
    rounds: int,
    against: Sequence[str] = (),
    source_format: str | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure the conversion of one generated checkpoint into each of `formats`.

    Args:
        formats: names of formats; "bf16", too, if the source is quantized.
        size_bytes: approximate size of the checkpoint in BF16.
        workers: threads of one of the two conversions of a round; the other has one thread.
        rounds: number of times moequant is measured; other tools run once.
        against: other tools of `TOOLS`.
        source_format: format of the source's experts; None for BF16.
        folder: where to write; by default the folder for temporary files.

    Returns:
        A JSON document.

    Raises:
        ArgumentError: an unknown tool; another tool than moequant, and a quantized source; or BF16
            to BF16.
        UnsupportedError: a tool that is not installed.
        MoequantError: not enough space, or a conversion failed.
    """
    _check_tools(against)
    _check_source(source_format, formats, against)
    _check_room(size_bytes, folder or Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="moequant-bench-", dir=folder) as name:
        place = Path(name)
        source = _write_source(place / "source", size_bytes, source_format)
        results = [
            _bench_format(place, source, format, workers=workers, rounds=rounds, against=against)
            for format in formats
        ]
    return {
        "machine": _machine(against),
        "source_format": source_format or "bf16",
        "weights": source.weights,
        "input_bytes": source.expert_bytes,
        "rounds": rounds,
        "formats": results,
    }


def _check_tools(names: Sequence[str]) -> None:
    others = [name for name in TOOLS if name != _OURS]
    for name in names:
        if name not in others:
            raise ArgumentError(unknown_name("tool", name, others))
        if find_spec(name) is None:
            raise UnsupportedError(
                f"{name} is not installed in moequant's environment: pip install {name}"
            )


def _check_source(
    source_format: str | None, formats: Sequence[str], against: Sequence[str]
) -> None:
    if source_format is None and any(get_format(name).is_plain for name in formats):
        raise ArgumentError(
            "bf16 dequantizes, but the checkpoint is BF16; name its format with --source-format"
        )
    if source_format is not None and against:
        raise ArgumentError(
            f"{', '.join(against)} is timed only on BF16; leave out --source-format"
        )


def _check_room(size_bytes: int, place: Path) -> None:
    """Check that the disk has space for the checkpoint and an output, which is no larger."""
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < 2 * size_bytes:
        raise MoequantError(
            f"{place}: {free_bytes / 1e9:.2f} GB free, but {2 * size_bytes / 1e9:.2f} GB are "
            "needed for the checkpoint and its output; choose a smaller --size, or another disk "
            "with --folder"
        )


def _write_source(plain: Path, size_bytes: int, format: str | None) -> _Source:
    """Write a checkpoint of about `size_bytes` in BF16; replace it by one in `format`, if given."""
    expert_bytes = write_bench_checkpoint(plain, size_bytes)
    weights = expert_bytes // torch.bfloat16.itemsize
    if format is None:
        return _Source(path=plain, format=None, weights=weights, expert_bytes=expert_bytes)
    result = convert(plain, plain.with_name("quantized"), format=format)
    shutil.rmtree(plain)
    kept = {copy.name for copy in result.plan.copies}
    tensors = Checkpoint.open(result.output).tensors.items()
    expert_bytes = sum(info.size_bytes for name, info in tensors if name not in kept)
    return _Source(path=result.output, format=format, weights=weights, expert_bytes=expert_bytes)


def _bench_format(
    place: Path,
    source: _Source,
    format: str,
    *,
    workers: int,
    rounds: int,
    against: Sequence[str],
) -> dict[str, Any]:
    input_bytes = _weight_bytes(source.path)
    counts = list(dict.fromkeys((1, workers)))
    floors: list[dict[str, float]] = []
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {(_OURS, n): [] for n in counts}
    output_bytes = 0
    for _ in range(rounds):
        for count in counts:
            run, output_bytes = _convert(_OURS, place, source, format=format, workers=count)
            runs[_OURS, count].append(run)
        floors += [
            _measure_floor(source.path, place / "floor", output_bytes)
            for _ in range(_FLOORS_A_ROUND)
        ]
    for tool in against:
        runs[tool, 1] = [_convert(tool, place, source, format=format, workers=1)[0]]
    floor = _least(floors)
    conversions = []
    for (tool, count), found in runs.items():
        best = _least(found)  # of one tool, so that `how` is the same in all
        # Other tools compute no digests.
        digest = floor["sha256_cpu_seconds"] if tool == _OURS else 0.0
        conversions.append(
            {
                "tool": tool,
                "workers": count,
                **best,
                "cpu_seconds_beyond_floor": best["cpu_seconds"] - floor["cpu_seconds"] - digest,
                "weights_per_cpu_second": source.weights / best["cpu_seconds"],
                "gb_per_cpu_second": input_bytes / 1e9 / best["cpu_seconds"],
                "gb_per_second": input_bytes / 1e9 / best["seconds"],
                "seconds_over_floor": best["seconds"] / floor["seconds"],
                "rounds": found,
            }
        )
    return {
        "format": format,
        "input_bytes": input_bytes,
        "output_bytes": output_bytes,
        "floor": {**floor, "rounds": floors},
        "conversions": conversions,
    }


def _least(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The smallest of each figure."""
    return {key: min(run[key] for run in rounds) for key in rounds[0]}


def _convert(
    tool: str, place: Path, source: _Source, *, format: str, workers: int
) -> tuple[dict[str, Any], int]:
    """Convert in a new process; returns what `one_conversion` says, and bytes of the output."""
    output = place / "output"
    _read(source.path)  # into the page cache, from which it may have been evicted
    command = [sys.executable, "-m", "moequant.benchmarks.one_conversion"]
    arguments = [tool, str(source.path), str(output), format, str(workers)]
    if source.format is not None:
        arguments.append(source.format)
    # The user's environment, but torch starts no threads in addition to the workers.
    environment = {**os.environ, "OMP_NUM_THREADS": str(workers)}
    done = subprocess.run(  # noqa: S603 - ourselves
        [*command, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise MoequantError(
            f"{tool} did not convert to {format}; it ended with:\n{done.stderr.strip()[-2000:]}"
        )
    written = _weight_bytes(output)
    shutil.rmtree(output)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, written


def _measure_floor(source: Path, target: Path, write_bytes: int) -> dict[str, float]:
    """CPU and clock time of reading and writing, and CPU time of SHA-256 of what is written."""
    buffer = _read(source)
    cpu, clock = time.process_time(), time.perf_counter()
    _read(source)
    with target.open("wb", buffering=0) as file:
        for chunk in _chunks(buffer, write_bytes):
            file.write(chunk)
        os.fsync(file.fileno())
    cpu_seconds, seconds = time.process_time() - cpu, time.perf_counter() - clock
    target.unlink()
    started = time.process_time()
    digest = hashlib.sha256()
    for chunk in _chunks(buffer, write_bytes):
        digest.update(chunk)
    sha256_cpu_seconds = time.process_time() - started
    return {
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "sha256_cpu_seconds": sha256_cpu_seconds,
    }


def _read(source: Path) -> memoryview:
    """Read all weights through one buffer, which is returned."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for path in source.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return buffer


def _chunks(buffer: memoryview, total: int) -> Iterator[memoryview]:
    for done in range(0, total, len(buffer)):
        yield buffer[: total - done]


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _machine(against: Sequence[str]) -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "moequant": __version__,
        "torch": str(torch.__version__),
        **{name: _version(name) for name in ("llvmlite", *against)},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
