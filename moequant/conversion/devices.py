"""Quantize on GPUs what is read and written by this machine's workers.

Each worker has a stream of its own on one of the devices, memory there for one unit, and
page-locked memory here that it reads a unit into and that its results come back to. It waits for
its own unit only; so while one worker's unit is copied or quantized, others read, write and digest
theirs.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import MoequantError, UnsupportedError
from moequant.formats.base import check_values
from moequant.quantizers import Choice, Quantizer, TorchQuantizer, choose_quantizer
from moequant.quantizers.base import UnavailableError
from moequant.quantizers.launch import (
    INFINITY,
    LAUNCHES,
    check_columns,
    device_bytes,
    quantize_on_device,
)
from moequant.quantizers.probes import check_bytes
from moequant.storage.buffers import Arena

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format, QuantizedWeight, StoredWeight
    from moequant.quantizers import Job
    from moequant.quantizers.base import Allocator, Stored

CPU = "cpu"
AUTO = "auto"
CUDA = "cuda"

_PORTABLE = 1
"""cudaHostRegister's flag: locked for all devices."""


def choose_device(text: str, jobs: Iterable[Job] = ()) -> Choice:
    """What quantizes on the device `text`.

    Args:
        text: "cpu"; "cuda", all GPUs that torch sees; "cuda:0,2", some of them; or "auto", all GPUs
            if there are any and the CPU if not.
        jobs: all there will be to do; it is made ready for them.

    Raises:
        MoequantError: no such device, or it cannot do the jobs; says why and what to do.
    """
    if text == CPU or (text == AUTO and not torch.cuda.is_available()):
        return choose_quantizer(jobs)
    devices = [torch.device(CUDA, i) for i in _indices(text)]
    try:
        import moequant.kernels.quantize.words  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"device {text}: Triton cannot be imported here ({error}); install triton, which "
            f"torch's CUDA builds bring, or convert with --device {CPU}"
        ) from error
    jobs = list(jobs)
    # Of plain weights nothing is decoded, and nothing need be loaded for it.
    is_decoding = any(isinstance(stored, str) for _, _, stored in jobs)
    decoder = choose_quantizer() if is_decoding else Choice(quantizer=TorchQuantizer())
    quantizer = DeviceQuantizer(devices, decoder.quantizer)
    try:
        for format, options, stored in jobs:
            quantizer.prepare(format, options, stored)
    except UnavailableError as error:
        raise UnsupportedError(f"device {text}: {error}; convert with --device {CPU}") from error
    reason = decoder.reason and f"sources are decoded by torch: {decoder.reason}"
    return Choice(quantizer=quantizer, reason=reason, devices=tuple(map(str, devices)))


def _indices(text: str) -> list[int]:
    """The GPUs that `text` names, by torch's numbers."""
    name, colon, listed = text.partition(":")
    numbers = listed.split(",") if colon else []
    if (
        (name != CUDA and text != AUTO)
        or not all(n.isascii() and n.isdigit() for n in numbers)
        or len({int(n) for n in numbers}) < len(numbers)
    ):
        raise UnsupportedError(
            f"device {text!r}, but {CPU}, {AUTO}, {CUDA} or {CUDA}:I,J,... is wanted, each GPU "
            f"once, such as {CUDA}:0,1"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        built = torch.version.cuda is not None
        why = "torch sees none" if built else "this torch is built without CUDA"
        raise UnsupportedError(f"device {text}: no GPU; {why}. Convert with --device {CPU}")
    for n in map(int, numbers):
        if n >= count:
            there = ", ".join(str(torch.device(CUDA, i)) for i in range(count))
            raise UnsupportedError(
                f"device {text}: no GPU {n}; torch sees {there}. CUDA_VISIBLE_DEVICES decides "
                "which it sees"
            )
    return [int(n) for n in numbers] or list(range(count))


class DeviceQuantizer(Quantizer):
    """The kernels of `moequant.kernels.quantize`; each worker is on one of the devices.

    Args:
        devices: GPUs.
        decoder: decodes and compares, on the CPU.
    """

    name = CUDA
    summary = "Triton kernels, a stream for each worker"

    def __init__(self, devices: Sequence[torch.device], decoder: Quantizer | None = None) -> None:
        self._devices = tuple(devices)
        self._decoder = decoder or TorchQuantizer()
        self._turn = itertools.count()
        self._own = threading.local()
        # Triton's launcher is not made for several threads, and compiles what it has not seen.
        self._launching = threading.Lock()
        self._ready: set[tuple[str, tuple[tuple[str, str], ...], torch.dtype]] = set()

    def allocate(self, size_bytes: int) -> Tensor:
        """As Quantizer; page-locked, so that copies run beside all else and at full speed."""
        return page_locked(size_bytes)

    def prepare(self, format: Format | None, options: Mapping[str, str], stored: Stored) -> None:
        """As Quantizer; on every device."""
        if format is None:
            self._decoder.prepare(format, options, stored)
        elif isinstance(stored, str):
            self.prepare_decoding(stored, torch.float32)
            self.prepare_comparing(stored, format.name)
            self._prepare_devices(format, options, torch.float32)
        else:
            self._prepare_devices(format, options, stored)

    def prepare_decoding(self, stored: str, dtype: torch.dtype) -> None:
        """As Quantizer."""
        self._decoder.prepare_decoding(stored, dtype)

    def prepare_comparing(self, before: Stored, after: Stored) -> None:
        """As Quantizer."""
        self._decoder.prepare_comparing(before, after)

    def _prepare_devices(
        self, format: Format, options: Mapping[str, str], dtype: torch.dtype
    ) -> None:
        key = format.name, tuple(sorted(options.items())), dtype
        if key in self._ready:
            return
        if format.name not in LAUNCHES:
            raise UnavailableError(f"it has no kernel for {format.name}")
        for device in self._devices:
            worker = _Worker(device)
            check_bytes(format, options, dtype, partial(self._run, worker), str(device))
        self._ready.add(key)

    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
        scratch: Allocator = torch.empty,
    ) -> list[QuantizedWeight]:
        """As Quantizer; waits for the results."""
        for w, name in zip(weights, names, strict=True):
            format.check_shape(w.shape, name)
            check_columns(format.name, w.shape[-1], name)
        numbers = self._numbers(weights, names, scratch)
        for w in numbers:
            self.prepare(format, options, w.dtype)
        if not hasattr(self._own, "worker"):
            device = self._devices[next(self._turn) % len(self._devices)]
            self._own.worker = _Worker(device)
        return self._run(self._own.worker, format, numbers, options, names, empty)

    def decode(
        self, q: QuantizedWeight, dtype: torch.dtype, *, name: str, empty: Allocator = torch.empty
    ) -> Tensor:
        """As Quantizer; on the CPU."""
        return self._decoder.decode(q, dtype, name=name, empty=empty)

    def compare(self, before: StoredWeight, after: StoredWeight) -> tuple[float, float]:
        """As Quantizer; on the CPU."""
        return self._decoder.compare(before, after)

    def _run(
        self,
        worker: _Worker,
        format: Format,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        names: Sequence[str],
        empty: Allocator,
    ) -> list[QuantizedWeight]:
        plain = [w for w in weights if isinstance(w, torch.Tensor)]
        assert len(plain) == len(weights), "they were decoded"
        with worker.at_work():
            results_bytes = sum(s.size_bytes for w in plain for s in format.specs(w.shape).values())
            weights_bytes = sum(w.nbytes for w in plain)
            worker.memory.reserve(device_bytes(weights_bytes, results_bytes, len(plain)))
            there = [worker.bring(w.detach()) for w in plain]
            with self._launching:
                results, largest = quantize_on_device(
                    format, there, options, empty=worker.memory.empty
                )
            back = [q.map(partial(_send_back, empty)) for q in results]
            found = _send_back(empty, largest)
        if found.max() >= INFINITY:
            for w, name in zip(plain, names, strict=True):
                check_values(w, name)
            raise AssertionError(f"{', '.join(names)}: not finite there, but finite here")
        return back


class _Worker:
    """What one worker has on its device."""

    def __init__(self, device: torch.device) -> None:
        self.memory = Arena(partial(torch.empty, dtype=torch.uint8, device=device))
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A worker that waits sleeps: others need the core.
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Do what is started in the block on this worker's stream, and wait for it."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._done.record()
                self._done.synchronize()
                self.memory.clear()

    def bring(self, w: Tensor) -> Tensor:
        """A copy of `w` on the device."""
        return self.memory.empty(w.shape, dtype=w.dtype).copy_(w, non_blocking=True)


def _send_back(empty: Allocator, t: Tensor) -> Tensor:
    return empty(t.shape, dtype=t.dtype).copy_(t, non_blocking=True)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _PageLocked(mmap.mmap):
    """Anonymous memory that the driver may copy from and to by itself."""

    address: int | None = None

    def lock(self, address: int) -> None:
        """Lock the pages from `address`, where this memory begins."""
        code = _cudart().cudaHostRegister(address, len(self), _PORTABLE)
        if int(code) != 0:
            raise MoequantError(
                f"{len(self)} bytes of memory cannot be page-locked (CUDA error {int(code)}); "
                "choose fewer --workers, or --device cpu"
            )
        self.address = address

    def __del__(self) -> None:
        if self.address is not None:
            _cudart().cudaHostUnregister(self.address)


def page_locked(size_bytes: int) -> Tensor:
    """Bytes, uint8 [size_bytes], that devices copy from and to at full speed.

    Not torch's own page-locked memory, which takes up to twice what it is asked for.

    Raises:
        MemoryError: the system refuses.
        MoequantError: the driver refuses.
    """
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        memory = _PageLocked(-1, size_bytes)
    except OSError as error:
        # As `Quantizer.allocate`.
        raise MemoryError(f"{size_bytes} bytes: {error.strerror}") from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    memory.lock(tensor.data_ptr())
    return tensor
