"""Evaluation holds one layer, one batch and two heads in memory, as its plan says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moequant import convert

# As in tests/calibration/test_memory.py: beyond a process that has evaluated a tiny model.
MEASURED = """
import json, re, sys
from pathlib import Path
import torch
from moequant.evaluation import evaluate

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
tiny, tiny_test, source, test, data, run_as = sys.argv[1:]
evaluate(tiny, [tiny_test], data, windows=1, window_tokens=16, run_as=run_as)
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
result = evaluate(source, [test], data, windows=4, window_tokens=256, batch_tokens=512,
                  run_as=run_as)
print(json.dumps([peak_bytes() - before, result.plan.memory.peak_bytes]))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    samples = [[(37 * n + i * i) % 128 for i in range(256)] for n in range(4)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in samples))
    return path


@pytest.mark.parametrize(
    ("run_as", "sizes"),
    [
        # Layers of 50 MB in BF16, or a head of 33 MB in float32 and logits of 33 MB.
        pytest.param(
            "weights", {"experts": 32, "hidden": 512, "intermediate": 512}, marks=pytest.mark.full
        ),
        ("runtime", {"experts": 32, "hidden": 512, "intermediate": 512}),
        ("weights", {"vocabulary": 32_768}),
    ],
)
def test_the_peak_stays_below_the_plans(make_checkpoint, data, tmp_path, run_as, sizes):
    source, tiny = make_checkpoint(layers=3, shard_bytes=100_000_000, **sizes), make_checkpoint()
    for name, folder in (("tiny", tiny), ("test", source)):
        convert(folder, tmp_path / name, format="nvfp4")
    arguments = [tiny, tmp_path / "tiny", source, tmp_path / "test", data, run_as]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    peak, planned = json.loads(done.stdout)
    print(f"{peak / 1e6:.0f} MB measured, {planned / 1e6:.0f} MB planned")
    assert peak < planned
