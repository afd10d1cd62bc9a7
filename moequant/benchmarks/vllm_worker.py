"""What vLLM adds to the class of its workers, the processes that use GPUs, to profile them."""

from __future__ import annotations

from typing import Any

from moequant.benchmarks.device_profile import DeviceProfiler


class ProfiledWorker:
    """vLLM's `worker_extension_cls`; its methods are called by name in every worker.

    Names have our prefix, because vLLM refuses those that a worker has already.
    """

    _moequant_profiler: DeviceProfiler

    def moequant_start_profile(self) -> None:
        """Start to profile the GPU of this worker."""
        self._moequant_profiler = DeviceProfiler()
        self._moequant_profiler.start()

    def moequant_stop_profile(self) -> dict[str, Any]:
        """The fields of the DeviceProfile since then, as what vLLM sends is of plain types."""
        found = self._moequant_profiler.stop()
        return {
            "busy_us": found.busy_us,
            "kernel_us": dict(found.kernel_us),
            "launches": dict(found.launches),
        }
