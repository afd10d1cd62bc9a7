"""Conversions in a process that may not have more memory than their plan says."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys

import pytest

from moequant.conversion import convert

# A first small conversion loads modules and compiles what is compiled; what is asked for then is
# the plan's alone. The limit counts all addresses, be there pages behind them or not; the measure
# counts pages.
LIMITED = """
import json, re, resource, sys
from pathlib import Path

import torch
from moequant.conversion import convert

small, source, output, workers = *sys.argv[1:4], int(sys.argv[4])
settings = {"format": sys.argv[6], "workers": workers}


def status(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\\s+(\\d+) kB", text)[1]) * 1024


convert(small, output + "-small", **settings)
plan = convert(source, output, dry_run=True, **settings).plan
stacks = 8 << 20  # of each thread, hardly used
limit = plan.peak_bytes(workers) + (workers + 1) * stacks + int(sys.argv[5])
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is resident now
resident = status("VmRSS")
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + limit,) * 2)
try:
    torch.empty(2 * limit, dtype=torch.uint8)
except RuntimeError:
    bites = True
else:
    bites = False
result = convert(source, output, **settings)
peak, grown = plan.peak_bytes(workers), status("VmHWM") - resident
document = {"bites": bites, "state": result.state, "limit": limit, "peak": peak, "grown": grown}
print(json.dumps(document))
"""
BESIDES_BYTES = 32 << 20
"""Headers, names, what malloc keeps, and buffers of the interpreter."""


def write_stacked(path, *, experts, size, layers=1):
    """gpt-oss in BF16 with hidden and intermediate size alike; all zeros, in holes of its file."""
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_act": "silu",
        "hidden_size": size, "intermediate_size": size, "num_hidden_layers": layers,
        "num_local_experts": experts, "num_experts_per_tok": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16, "swiglu_limit": 7.0,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (16, size), "lm_head.weight": (16, size)}
    for layer in range(layers):
        at = f"model.layers.{layer}.mlp"
        shapes |= {
            f"{at}.experts.gate_up_proj": (experts, size, 2 * size),
            f"{at}.experts.gate_up_proj_bias": (experts, 2 * size),
            f"{at}.experts.down_proj": (experts, size, size),
            f"{at}.experts.down_proj_bias": (experts, size),
            f"{at}.router.weight": (experts, size),
            f"{at}.router.bias": (experts,),
        }
    header, offset = {}, 0
    for name, shape in shapes.items():
        size_bytes = 2 * math.prod(shape)
        offsets = [offset, offset + size_bytes]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        offset += size_bytes
    text = json.dumps(header).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    (path / "config.json").write_text(json.dumps(config))
    return max(2 * math.prod(shape) for shape in shapes.values())


def convert_within_the_plan(small, source, output, workers, format="mxfp4"):
    command = [sys.executable, "-c", LIMITED, small, source, output, workers, BESIDES_BYTES, format]
    # An arena of malloc for each thread would take 64 MiB of addresses.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        env=environment, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["bites"]
    assert document["state"] == "converted"
    assert document["grown"] < document["peak"] + BESIDES_BYTES
    return document


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_checkpoint_converts_within_its_plan(make_checkpoint, tmp_path, small_source, workers):
    source = make_checkpoint(
        layers=1, experts=96, hidden=1024, intermediate=384, vocabulary=2048, shard_bytes=80_000_000
    )
    document = convert_within_the_plan(small_source, source, tmp_path / "out", workers)
    assert document["limit"] < 2 * 96 * 3 * 1024 * 384  # less than all experts


@pytest.mark.parametrize(("stored", "format"), [("fp8_block", "nvfp4"), ("mxfp4", "bf16")])
def test_a_quantized_source_converts_within_its_plan(
    make_checkpoint, tmp_path, small_source, stored, format
):
    large = make_checkpoint(
        layers=1,
        experts=16,
        hidden=2048,
        intermediate=1024,
        vocabulary=2048,
        shard_bytes=80_000_000,
    )
    sources = {}
    for name, plain in (("small", small_source), ("large", large)):
        sources[name] = convert(plain, tmp_path / name, format=stored).output
    convert_within_the_plan(sources["small"], sources["large"], tmp_path / "out", 2, format)


def test_experts_stacked_in_one_tensor_convert_within_the_plan(tmp_path):
    write_stacked(tmp_path / "small", experts=2, size=128)
    largest = write_stacked(tmp_path / "source", experts=320, size=512)
    document = convert_within_the_plan(tmp_path / "small", tmp_path / "source", tmp_path / "out", 2)
    assert document["limit"] < largest / 2


@pytest.mark.full
def test_5_gb_of_experts_in_one_tensor_convert_within_the_plan(tmp_path):
    """Experts of the size of gpt-oss."""
    write_stacked(tmp_path / "small", experts=2, size=128)
    largest = write_stacked(tmp_path / "source", experts=152, size=2880)
    assert largest > 5e9
    document = convert_within_the_plan(tmp_path / "small", tmp_path / "source", tmp_path / "out", 2)
    assert document["limit"] < 1e9


def test_the_peak_is_printed_beforehand(small_source, tmp_path):
    from click.testing import CliRunner

    from moequant.cli import cli

    words = ["convert", str(small_source), str(tmp_path / "out"), "--format", "mxfp4", "--dry-run"]
    peak = convert(small_source, tmp_path / "out", format="mxfp4", dry_run=True).plan.peak_bytes(3)
    shown = CliRunner().invoke(cli, [*words, "--workers", "3"])
    assert f"peak memory  {peak / 1e6:.1f} MB with 3 workers" in shown.output
