"""Time `load_experts` of all layers of a checkpoint, beside a plain read of the same bytes.

The plain read moves those bytes in pieces of 16 MiB: each of a few threads fills a pinned buffer of
its own and copies it to the device, where nothing is kept. It is timed with 1, 2, 4, 8 and 16
threads, and the fastest counts. Both find the files in the page cache, where a first, untimed load
put them.
"""

from __future__ import annotations

import gc
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from moequant.benchmarks.machine import describe_cpu, describe_machine
from moequant.device import usable_device
from moequant.errors import CheckpointError, UnsupportedError
from moequant.progress import SilentProgress
from moequant.runtime.backends import TARGETS, never_run_readers
from moequant.runtime.load import load_experts
from moequant.runtime.prepared import PreparedCheckpoint
from moequant.runtime.prepared_manifest import prepared_folders, read_manifest
from moequant.storage.buffers import tensor_bytes
from moequant.storage.folder import is_prepared_folder
from moequant.storage.given_path import given_path
from moequant.weights.converted import ConvertedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice
    from moequant.storage.reader import FixedFile

_PIECE_BYTES = 16 << 20
_THREADS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Bytes of a file, from `start` up to `stop`."""

    file: FixedFile
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """How many."""
        return self.stop - self.start

    def read_into(self, buffer: torch.Tensor) -> int:
        """Fill the beginning of `buffer`; how many bytes."""
        self.file.read_into(self.start, tensor_bytes(buffer[: self.size_bytes]))
        return self.size_bytes


def bench_loading(
    checkpoint: str | Path,
    *,
    device: torch.device | str = "cuda",
    activations: ActivationsChoice = "format",
    rounds: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time loading a converted checkpoint's experts, and every prepared folder in it.

    Args:
        checkpoint: a converted checkpoint.
        device: where the experts are put; it must hold those of all layers at once.
        activations: see `load_experts`.
        rounds: at least 1; medians are reported.
        progress: told of every round.

    Returns:
        A JSON document: `measured`, `machine`, `checkpoint`, `layers`, `rounds`, and `folders`, the
        checkpoint itself first. Of each: `folder`, `prepared_for` (a target or null), and either
        `error`, or `activations` (the schemes that the loaded experts run with), `layout` (those of
        the prepared folder, or in which the backend reads what was converted), `never_run` (the
        backends of a prepared folder's layout that no GPU has run), `bytes` read, `load_s`,
        `plain_s`, `plain_threads`, and `share` of the plain read's speed.

    Raises:
        CheckpointError: not a converted checkpoint, or a damaged one.
        UnsupportedError: no such device, or no layer can be loaded there.
    """
    path = given_path("checkpoint", checkpoint)
    converted = ConvertedCheckpoint.open(path, quantized_activations=True)
    place = usable_device(device)
    folder = converted.checkpoint.path
    layers = list(converted.expert_layers())
    prepared = {
        path.name: path
        for path in prepared_folders(folder)
        if path.name in TARGETS and _may_be_prepared(path)
    }
    report = progress or SilentProgress()
    report.start("loading", rounds * (1 + len(prepared)), unit="rounds")
    rows = [_row(folder, None, place, layers, activations, rounds, report)]
    for target, path in prepared.items():
        try:
            rows.append(_row(path, target, place, layers, activations, rounds, report))
        except (CheckpointError, UnsupportedError) as error:
            rows.append({"folder": str(path), "prepared_for": target, "error": str(error)})
    report.finish()
    on_gpu = place.type == "cuda"
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(place) if on_gpu else describe_cpu(),
        "checkpoint": str(folder),
        "layers": len(layers),
        "rounds": rounds,
        "folders": rows,
    }


def _may_be_prepared(folder: Path) -> bool:
    """Whether `moequant prepare` wrote it, or it cannot be searched, which loading then says."""
    try:
        return is_prepared_folder(folder)
    except CheckpointError:
        return True


def _row(
    folder: Path,
    target: str | None,
    device: torch.device,
    layers: Sequence[int],
    activations: ActivationsChoice,
    rounds: int,
    report: Progress,
) -> dict[str, Any]:
    schemes: set[str] = set()
    layouts: set[str] = set()

    def load() -> object:
        return load_experts(folder, layers, device, activations=activations)

    def load_first() -> None:
        for experts in load_experts(folder, layers, device, activations=activations).values():
            packed = experts.packed()
            schemes.add(packed.workload.activations)
            layouts.add(packed.layout.name)

    _timed(load_first, device)  # fills the page cache, and compiles what packs
    if target is not None:
        layouts = {entry.layout for entry in read_manifest(folder).layers.values()}
    spans = list(_spans(folder, layers))
    loads: list[float] = []
    plain: dict[int, list[float]] = {threads: [] for threads in _THREADS}
    for _ in range(rounds):
        loads.append(_timed(load, device))
        for threads, times in plain.items():
            times.append(_timed(lambda n=threads: _read(spans, device, n), device))
        report.advance(1, str(folder))
    fastest = min(_THREADS, key=lambda threads: statistics.median(plain[threads]))
    load_s, plain_s = statistics.median(loads), statistics.median(plain[fastest])
    return {
        "folder": str(folder),
        "prepared_for": target,
        "activations": sorted(schemes),
        "layout": sorted(layouts),
        "never_run": [] if target is None else never_run_readers(layouts),
        "bytes": sum(span.size_bytes for span in spans),
        "load_s": load_s,
        "plain_s": plain_s,
        "plain_threads": fastest,
        "share": plain_s / load_s,
    }


def _timed(work: Any, device: torch.device) -> float:
    """Seconds of `work`, with what it returns freed behind it, and all that was queued done."""
    gc.collect()
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    took = time.perf_counter() - start
    del result
    return took


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spans(folder: Path, layers: Sequence[int]) -> Iterator[Span]:
    """What loading reads of weights, in pieces: neighbours in a file are one run before."""
    for run in _runs(folder, layers):
        for start in range(run.start, run.stop, _PIECE_BYTES):
            yield Span(file=run.file, start=start, stop=min(start + _PIECE_BYTES, run.stop))


def _runs(folder: Path, layers: Sequence[int]) -> list[Span]:
    prepared = (
        PreparedCheckpoint.open(folder, quantized_activations=True)
        if is_prepared_folder(folder)
        else None
    )
    converted = (
        prepared.converted
        if prepared
        else ConvertedCheckpoint.open(folder, quantized_activations=True)
    )
    found: set[tuple[str, int, int]] = set()
    files: dict[str, FixedFile] = {}

    def add(file: FixedFile, start: int, stop: int) -> None:
        files[str(file.path)] = file
        found.add((str(file.path), start, stop))

    for layer in layers:
        if prepared is not None:
            file, _, _ = prepared.open_layer(layer)
            for info in file.tensors.values():
                add(file.file, info.start, info.stop)
            continue
        for expert in range(converted.moe.experts):
            for projection in converted.moe.projections:
                weight = converted.encoded(converted.expert_module(layer, expert, projection))
                for where in weight.locate(converted.checkpoint).values():
                    add(where.file, where.info.start, where.info.stop)
    runs: list[Span] = []
    for path, start, stop in sorted(found):
        last = runs[-1] if runs else None
        if last is not None and str(last.file.path) == path and last.stop == start:
            runs[-1] = Span(file=last.file, start=last.start, stop=stop)
        else:
            runs.append(Span(file=files[path], start=start, stop=stop))
    return runs


def _read(spans: Sequence[Span], device: torch.device, threads: int) -> None:
    """Read all spans to the device, in `threads` threads."""
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_read_some, spans[n::threads], device) for n in range(threads)]:
            done.result()


def _read_some(spans: Sequence[Span], device: torch.device) -> None:
    """Read by two buffers, of which one is copied while the other is filled."""
    on_gpu = device.type == "cuda"
    buffers = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    if not on_gpu:
        for number, span in enumerate(spans):
            span.read_into(buffers[number % 2])
        return
    there = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for number, span in enumerate(spans):
            buffer, done = buffers[number % 2], copied[number % 2]
            done.synchronize()
            size_bytes = span.read_into(buffer)
            there[:size_bytes].copy_(buffer[:size_bytes], non_blocking=True)
            done.record(stream)
    stream.synchronize()
