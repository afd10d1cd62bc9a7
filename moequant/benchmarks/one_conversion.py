"""One conversion in a process of its own, so that its memory and its imports are its own.

    python -m moequant.benchmarks.one_conversion TOOL SOURCE OUTPUT FORMAT WORKERS [SOURCE_FORMAT]

Prints a JSON document: what `OneConversion` holds. Only `moequant bench convert` runs it.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LLMCOMPRESSOR_SCHEMES = {
    "fp8_block": "FP8_BLOCK",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "w4a8": "W4A16",
}
"""What llm-compressor calls the nearest it has; W4A16 has w4a8's codes with other scales."""


@dataclass(frozen=True, kw_only=True)
class OneConversion:
    """What one conversion took.

    Attributes:
        how: what quantized.
        import_cpu_seconds: to load the libraries.
        prepare_cpu_seconds: to compile and to compare kernels; 0 where there is nothing of it.
        cpu_seconds: of the conversion itself, all threads together.
        seconds: on the clock, from the call to the return.
        peak_rss_bytes: largest resident memory of the process.
    """

    how: str
    import_cpu_seconds: float
    prepare_cpu_seconds: float
    cpu_seconds: float
    seconds: float
    peak_rss_bytes: int


def run_moequant(
    source: str, output: str, format: str, workers: int, source_format: str | None = None
) -> OneConversion:
    """Convert with moequant, from a source whose experts are in `source_format` or in BF16."""
    started = time.process_time()
    import torch

    from moequant.conversion import convert
    from moequant.formats import get_format
    from moequant.quantizers import choose_quantizer

    imported = time.process_time()
    wanted = get_format(format)
    options = wanted.resolve_options()
    choice = choose_quantizer([(wanted, options, source_format or torch.bfloat16)])
    prepared = time.process_time()
    cpu_seconds, seconds = _timed(lambda: convert(source, output, format=format, workers=workers))
    return OneConversion(
        how=f"{choice.quantizer.name} quantizer",
        import_cpu_seconds=imported - started,
        prepare_cpu_seconds=prepared - imported,
        cpu_seconds=cpu_seconds,
        seconds=seconds,
        peak_rss_bytes=_peak_rss_bytes(),
    )


def run_llmcompressor(source: str, output: str, format: str, workers: int) -> OneConversion:
    """Convert with llm-compressor's `model_free_ptq`, on as many threads as there are workers."""
    started = time.process_time()
    import torch
    from llmcompressor import model_free_ptq

    imported = time.process_time()
    torch.set_num_threads(workers)
    scheme = LLMCOMPRESSOR_SCHEMES[format]
    cpu_seconds, seconds = _timed(
        lambda: model_free_ptq(
            source,
            output,
            scheme=scheme,
            ignore=["re:.*mlp.gate$", "re:.*embed_tokens$", "lm_head"],
            max_workers=workers,
        )
    )
    return OneConversion(
        how=f"{version('llmcompressor')}, scheme {scheme}",
        import_cpu_seconds=imported - started,
        prepare_cpu_seconds=0.0,
        cpu_seconds=cpu_seconds,
        seconds=seconds,
        peak_rss_bytes=_peak_rss_bytes(),
    )


TOOLS: dict[str, Callable[..., OneConversion]] = {
    "moequant": run_moequant,
    "llmcompressor": run_llmcompressor,
}


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage's, which a child inherits from its parent on Linux
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert peak is not None
        return int(peak[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    tool, source, output, format, workers, *source_format = sys.argv[1:]
    result = TOOLS[tool](source, output, format, int(workers), *source_format)
    sys.stdout.write("\n" + json.dumps(asdict(result)))
