"""A conversion holds a few experts in memory, however large the checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from moequant.conversion import convert
from moequant.formats import CONVERTIBLE
from moequant.storage.checkpoint import Checkpoint
from moequant.verification import verify

# Peak resident memory, mapped file pages included, beyond what importing torch and LLVM's library
# takes. That library is 180 MB of file, of which about 80 MB become resident as it is loaded.
MEASURED = """
import json, re, sys
from pathlib import Path
import torch
from llvmlite import binding

def peak_bytes():
    # Not getrusage, whose peak a child process inherits from the process that forked it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak_bytes()
from moequant.conversion import convert

convert(sys.argv[1], sys.argv[2], workers=2, **json.loads(sys.argv[3]))
print(peak_bytes() - before)
"""

QUICK = ("fp8_block", "nvfp4", "w4a8")
"""Formats that `make test` measures, too: of blocks, of groups with a global scale, of integers."""


def peak_of_conversion(source, output, format, **given):
    arguments = json.dumps({"format": format, **given})
    command = [sys.executable, "-c", MEASURED, str(source), str(output), arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    return int(done.stdout)


@pytest.fixture(scope="module")
def sized(make_checkpoint):
    """About 160 MB in two shards, of experts of 0.8 MB each."""
    return make_checkpoint(
        layers=1, experts=64, hidden=1024, intermediate=384, vocabulary=2048, shard_bytes=80_000_000
    )


@pytest.mark.parametrize(
    "format",
    [
        format if format in QUICK else pytest.param(format, marks=pytest.mark.full)
        for format in CONVERTIBLE
    ],
)
def test_the_peak_stays_below_the_plans(sized, tmp_path, format):
    plan = convert(sized, tmp_path / "out", format=format, dry_run=True).plan
    peak = peak_of_conversion(sized, tmp_path / "out", format)
    # Modules and torch's own first use beyond `import torch`.
    modules_bytes = 60e6
    assert peak < plan.peak_bytes(workers=2) + modules_bytes


def test_the_peak_of_gptq_stays_below_the_plans(make_checkpoint, measure, tmp_path):
    source = make_checkpoint(layers=1, experts=3, hidden=1536, intermediate=128)
    stats = measure(source, tmp_path / "stats", hessian=True)
    given = {"options": {"rounding": "gptq"}, "statistics": str(stats)}
    plans = [
        convert(source, tmp_path / "out", format="mxfp4", dry_run=True, **settings).plan
        for settings in ({}, given)
    ]
    peaks = [plan.peak_bytes(workers=2) for plan in plans]
    # Four matrices [K, K] of the hidden states in float64, for each worker.
    assert peaks[1] - peaks[0] > 2 * 32 * 1536**2 - 60e6
    assert peak_of_conversion(source, tmp_path / "out", "mxfp4", **given) < peaks[1] + 60e6


@pytest.mark.full
def test_4_5_gb_convert_in_1_5_gb(make_checkpoint, tmp_path):
    """Experts of the sizes of Qwen3-30B-A3B."""
    # One test of all formats: each process that runs tests would make a source of its own.
    large = make_checkpoint(
        path=tmp_path / "source",
        layers=4,
        experts=128,
        hidden=2048,
        intermediate=768,
        shard_bytes=1_000_000_000,
    )
    total = json.loads((large / "model.safetensors.index.json").read_text())["metadata"]
    assert total["total_size"] > 4.5e9
    for format in CONVERTIBLE:
        assert peak_of_conversion(large, tmp_path / "out", format) < 1.5e9, format
        shutil.rmtree(tmp_path / "out")


PLANNED = """
import json, re, sys
from pathlib import Path

from moequant.conversion import convert

def status(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\\s+(\\d+) kB", text)[1]) * 1024

small, large, output, format = sys.argv[1:]
convert(small, output, format=format, dry_run=True)
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is resident now
before = status("VmRSS")
plan = convert(large, output, format=format, dry_run=True).plan
json.dumps(plan.index(), indent=2).encode()
print(status("VmHWM") - before, plan.memory.plan_bytes)
"""


def write_many(path, *, layers, experts):
    """Qwen3 with experts of 128 x 128 alone; all zeros, in a hole of their file."""
    config = {
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 128,
        "moe_intermediate_size": 128, "num_hidden_layers": layers, "num_experts": experts,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        for layer in range(layers)
        for expert in range(experts)
        for projection in ("gate", "up", "down")
    ]
    size_bytes = 2 * 128 * 128
    header = {
        name: {
            "dtype": "BF16",
            "shape": [128, 128],
            "data_offsets": [i * size_bytes, (i + 1) * size_bytes],
        }
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + len(names) * size_bytes)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("format", ["nvfp4", pytest.param("fp8_block", marks=pytest.mark.full)])
def test_a_plan_of_many_tensors_takes_what_it_says(tmp_path, format):
    small = write_many(tmp_path / "small", layers=1, experts=2)
    large = write_many(tmp_path / "large", layers=10, experts=500)
    command = [sys.executable, "-c", PLANNED, small, large, tmp_path / "out", format]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    grown, said = map(int, done.stdout.split())
    # Less than half would promise memory that nobody needs.
    assert said / 2 < grown < said


FREED = """
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from moequant.quantizers import Quantizer

def resident_bytes():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def allocated(size_bytes):
    return Quantizer().allocate(size_bytes).fill_(1)

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


ROWS = 16384
"""Of a matrix of attention with 2048 columns: 32 M weights, four tiles."""


@pytest.fixture
def fp8_with_large_attention(tmp_path):
    """A Qwen3 in FP8 blocks whose q_proj is large; all its other weights are small."""
    path, generator = tmp_path / "source", torch.Generator().manual_seed(0)
    config = {
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048,
        "moe_intermediate_size": 128, "num_hidden_layers": 1, "num_experts": 1,
        "num_experts_per_tok": 1, "quantization_config": FP8,
    }  # fmt: skip
    expert, shapes = "model.layers.0.mlp.experts.0", {}
    shapes |= {f"{expert}.{leaf}_proj": (128, 2048) for leaf in ("gate", "up")}
    shapes |= {f"{expert}.down_proj": (2048, 128)}
    shapes |= {"model.layers.0.self_attn.q_proj": (ROWS, 2048)}
    tensors = {}
    for module, (N, K) in shapes.items():
        codes = torch.randint(0, 0x7F, (N, K), dtype=torch.uint8, generator=generator)
        scale = torch.randn((N // 128, K // 128), generator=generator).abs() + 0.01
        tensors[f"{module}.weight"] = codes.view(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale_inv"] = scale
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path, tensors


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_large_weights_are_dequantized_some_rows_at_a_time(fp8_with_large_attention, tmp_path):
    source, tensors = fp8_with_large_attention
    result = convert(source, tmp_path / "out", format="nvfp4", workers=2)
    # Whole, q_proj alone takes 34 MB as codes and twice that in BF16, for each worker and the disk.
    assert result.plan.peak_bytes(2) < 250e6
    module = "model.layers.0.self_attn.q_proj"
    codes, scale = tensors[f"{module}.weight"].float(), tensors[f"{module}.weight_scale_inv"]
    wanted = codes * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = Checkpoint.open(tmp_path / "out").read(f"{module}.weight")
    assert torch.equal(found, wanted.bfloat16())
    (loss,) = (loss for loss in result.requantization_errors if loss.role == "attention")
    assert (loss.weights, loss.exact) == (1, 0)
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert loss.relative_error == pytest.approx(error.item(), rel=1e-6)
    report = verify(tmp_path / "out", against=source)
    assert report.ok, report.problems
    assert report.requantization_errors == result.requantization_errors


def test_a_flipped_bit_in_a_later_tile_is_named_by_its_place(fp8_with_large_attention, tmp_path):
    source, _ = fp8_with_large_attention
    out = convert(source, tmp_path / "out", format="nvfp4").output
    name = "model.layers.0.self_attn.q_proj.weight"
    info = Checkpoint.open(out).info(name)
    with (out / info.file).open("r+b") as file:
        place = info.start + 2 * ((ROWS - 3) * 2048 + 5)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    (problem,) = [p for p in verify(out, against=source).problems if p.check == "weights"]
    assert problem.name == name
    assert problem.message.startswith(f"element [{ROWS - 3}, 5] is ")


def test_the_memory_of_dequantized_weights_is_what_the_plan_says(
    fp8_with_large_attention, tmp_path
):
    source, _ = fp8_with_large_attention
    plan = convert(source, tmp_path / "out", format="nvfp4", dry_run=True).plan
    peak = peak_of_conversion(source, tmp_path / "out", "nvfp4")
    assert peak < plan.peak_bytes(workers=2) + 60e6  # as above
