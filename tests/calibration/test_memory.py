"""Calibration holds one layer and one batch in memory, as its plan says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

# Peak resident memory beyond that of a process that has calibrated a tiny model: modules are
# imported, and libraries have their buffers. Writing 5 to clear_refs forgets the peak.
MEASURED = """
import json, re, sys
from pathlib import Path
import torch
from moequant.calibration import calibrate

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
tiny, source, data, folder, settings = sys.argv[1:]
calibrate(tiny, data, folder + "/tiny", tokens=64)
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
result = calibrate(source, data, folder + "/stats", **json.loads(settings))
print(json.dumps([peak_bytes() - before, result.plan.memory.peak_bytes]))
"""


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    samples = [[(37 * n + i * i) % 128 for i in range(512)] for n in range(12)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in samples))
    return path


@pytest.fixture(scope="module")
def models(make_checkpoint, tmp_path_factory):
    """models(model_type): a tiny checkpoint, and one with layers of 100 MB in BF16."""

    def make(model_type):
        sizes = {"layers": 3, "experts": 32, "hidden": 512, "intermediate": 1024}
        if model_type != "gpt_oss":
            large = make_checkpoint(model_type=model_type, shard_bytes=100_000_000, **sizes)
            return make_checkpoint(model_type=model_type), large
        return gpt_oss(2, 4, 64, 64), gpt_oss(*sizes.values())

    def gpt_oss(layers, experts, hidden, intermediate):
        config = GptOssConfig(
            vocab_size=128,
            num_hidden_layers=layers,
            num_local_experts=experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_experts_per_tok=2,
        )
        folder = tmp_path_factory.mktemp("gpt_oss")
        GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        return folder

    return make


def measured(tiny, source, ids, folder, settings):
    """The peak of a calibration in a process of its own, and what its plan says."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, tiny, source, ids, folder, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_moe", {}),
        pytest.param("qwen3_moe", {"hessian": True}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"batch_tokens": 512}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.full),
        ("gpt_oss", {}),
    ],
)
def test_the_peak_stays_below_the_plans(models, ids, tmp_path, model_type, settings):
    tiny, source = models(model_type)
    peak, planned = measured(tiny, source, ids, tmp_path, settings)
    print(f"{peak / 1e6:.0f} MB measured, {planned / 1e6:.0f} MB planned")
    assert peak < planned


def test_the_peak_does_not_grow_with_the_layers(make_checkpoint, ids, tmp_path):
    peaks = []
    for layers in (2, 16):
        source = make_checkpoint(
            layers=layers, experts=32, hidden=512, intermediate=512, shard_bytes=100_000_000
        )
        folder = tmp_path / str(layers)
        folder.mkdir()
        peak, _ = measured(make_checkpoint(), source, ids, folder, {"tokens": 512})
        peaks.append(peak / 1e6)
    print(f"{peaks[0]:.0f} MB with 2 layers, {peaks[1]:.0f} MB with 16")
    # A layer that stayed would add 100 MB; the C library keeps some pieces.
    assert peaks[1] < peaks[0] + 20
