"""A conversion holds a few experts in memory, however large the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moequant.conversion import convert
from moequant.formats import REGISTRY

# Peak resident memory, mapped file pages included, beyond what importing torch and LLVM's library
# takes. That library is 180 MB of file, of which about 80 MB become resident as it is loaded.
MEASURED = """
import re, sys
from pathlib import Path
import torch
from llvmlite import binding

def peak_bytes():
    # Not getrusage, whose peak a child process inherits from the process that forked it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak_bytes()
from moequant.conversion import convert

convert(sys.argv[1], sys.argv[2], format=sys.argv[3], workers=2)
print(peak_bytes() - before)
"""


def peak_of_conversion(source, output, format):
    command = [sys.executable, "-c", MEASURED, str(source), str(output), format]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    return int(done.stdout)


@pytest.fixture(scope="module")
def sized(make_checkpoint):
    """About 160 MB in two shards, of experts of 0.8 MB each."""
    return make_checkpoint(
        layers=1, experts=64, hidden=1024, intermediate=384, vocabulary=2048, shard_bytes=80_000_000
    )


@pytest.mark.parametrize("format", REGISTRY)
def test_the_peak_stays_below_the_plans(sized, tmp_path, format):
    plan = convert(sized, tmp_path / "out", format=format, dry_run=True).plan
    peak = peak_of_conversion(sized, tmp_path / "out", format)
    # Modules and torch's own first use beyond `import torch`.
    modules_bytes = 60e6
    assert peak < plan.peak_bytes(workers=2) + modules_bytes


@pytest.fixture(scope="module")
def large(make_checkpoint):
    """4.8 GB of BF16 experts of the sizes of Qwen3-30B-A3B."""
    return make_checkpoint(
        layers=4, experts=128, hidden=2048, intermediate=768, shard_bytes=1_000_000_000
    )


@pytest.mark.full
@pytest.mark.parametrize("format", REGISTRY)
def test_4_5_gb_convert_in_1_5_gb(large, tmp_path, format):
    total = json.loads((large / "model.safetensors.index.json").read_text())["metadata"]
    assert total["total_size"] > 4.5e9
    assert peak_of_conversion(large, tmp_path / "out", format) < 1.5e9


FREED = """
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from moequant.quantizers.tiles import TorchQuantizer

def resident_bytes():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def allocated(size_bytes):
    return TorchQuantizer().allocate(size_bytes).fill_(1)

with ThreadPoolExecutor(4) as pool:
    list(pool.map(bytes, [1] * 4))
    before = resident_bytes()
    # Each size, once freed, makes the C library keep what is smaller.
    for size_mib in (31, 5, 9, 3, 8, 20, 8, 9):
        held = list(pool.map(allocated, [size_mib << 20] * 4))
        del held[::2]
        held.clear()
    print(resident_bytes() - before)
"""


def test_memory_of_results_goes_back_to_the_system_when_it_is_freed():
    done = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 8 << 20  # less than the least that was freed
