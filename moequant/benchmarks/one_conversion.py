"""One conversion in a process of its own, so that its memory and imports are measured alone.

    python -m moequant.benchmarks.one_conversion TOOL SOURCE OUTPUT FORMAT WORKERS [SOURCE_FORMAT]

Only `moequant bench convert` runs it. It prints a JSON object:

    how                  what quantized
    import_cpu_seconds   to load the libraries
    prepare_cpu_seconds  to compile and check kernels
    cpu_seconds          of the conversion itself, all threads together
    seconds              of the conversion on the clock
    peak_rss_bytes       largest resident memory of the process
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Prepared = tuple[str, float, Callable[[], object]]
    """What quantizes, CPU seconds of the process after all imports, and the conversion."""

LLMCOMPRESSOR_SCHEMES = {
    "fp8_block": "FP8_BLOCK",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "w4a8": "W4A16",
}
"""llm-compressor's nearest scheme; W4A16 has w4a8's codes with other scales."""


def prepare_moequant(
    source: str, output: str, format: str, workers: int, source_format: str | None = None
) -> Prepared:
    """Import moequant and compile its kernels, for experts in `source_format` or in BF16."""
    import torch

    from moequant.conversion import convert
    from moequant.formats import get_format
    from moequant.quantizers import choose_quantizer

    imported = time.process_time()
    wanted = get_format(format)
    choice = choose_quantizer([(wanted, wanted.resolve_options(), source_format or torch.bfloat16)])
    return (
        f"{choice.quantizer.name} quantizer",
        imported,
        lambda: convert(source, output, format=format, workers=workers),
    )


def prepare_llmcompressor(source: str, output: str, format: str, workers: int) -> Prepared:
    """Import llm-compressor, whose `model_free_ptq` converts with as many threads as workers."""
    import torch
    from llmcompressor import model_free_ptq

    imported = time.process_time()
    torch.set_num_threads(workers)
    scheme = LLMCOMPRESSOR_SCHEMES[format]
    return (
        f"{version('llmcompressor')}, scheme {scheme}",
        imported,
        lambda: model_free_ptq(
            source,
            output,
            scheme=scheme,
            ignore=["re:.*mlp.gate$", "re:.*embed_tokens$", "lm_head"],
            max_workers=workers,
        ),
    )


TOOLS: dict[str, Callable[..., Prepared]] = {
    "moequant": prepare_moequant,
    "llmcompressor": prepare_llmcompressor,
}


def _measure(tool: str, *arguments: Any) -> dict[str, Any]:
    started = time.process_time()
    how, imported, convert = TOOLS[tool](*arguments)
    prepared, clock = time.process_time(), time.perf_counter()
    convert()
    return {
        "how": how,
        "import_cpu_seconds": imported - started,
        "prepare_cpu_seconds": prepared - imported,
        "cpu_seconds": time.process_time() - prepared,
        "seconds": time.perf_counter() - clock,
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage's, which a child inherits from its parent on Linux
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert peak is not None
        return int(peak[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    tool, source, output, format, workers, *source_format = sys.argv[1:]
    result = _measure(tool, source, output, format, int(workers), *source_format)
    sys.stdout.write("\n" + json.dumps(result))
