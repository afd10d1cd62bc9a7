from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

import moequant

CALLS = """
import sys, torch
from moequant import load_experts
experts = load_experts(sys.argv[1], 0, "cuda")
topk = 2
for M in range(1, 601):
    ids = torch.arange(M * topk, device="cuda").reshape(M, topk) % experts.weights.experts
    experts(torch.ones(M, experts.weights.hidden, device="cuda").bfloat16(),
            torch.ones(M, topk, device="cuda"), ids.int())
torch.cuda.synchronize()
"""


def test_the_reference_compiles_nothing_and_says_so(run, converted):
    result = run("warm-up", converted, "--device", "cpu", "--json")
    assert result.exit_code == 0
    assert result.document["layers"] == [
        {
            "format": "nvfp4",
            "activations": "none",
            "act_fn": "silu",
            "backend": "torch_reference",
            "kernel_sets": [],
        }
    ]
    assert (
        "nvfp4 with activations none and silu by torch_reference: nothing to compile"
        in run("warm-up", converted, "--device", "cpu").stdout
    )


def test_activations_are_those_that_the_experts_will_be_loaded_with(run, converted):
    result = run("warm-up", converted, "--device", "cpu", "--activations", "fp8_token", "--json")
    assert [kind["activations"] for kind in result.document["layers"]] == ["fp8_token"]


def test_skip_compiles_nothing_and_loads_no_layer(run, converted):
    # No CUDA device is asked for, though it is the default.
    result = run("warm-up", converted, "--mode", "skip", "--json")
    assert result.exit_code == 0
    assert result.document["layers"] == []
    assert result.document["mode"] == "skip"
    shown = run("warm-up", converted, "--mode", "skip").stdout
    assert "nothing compiled; kernels compile on first use" in shown


def test_a_mode_that_is_none_is_refused(run, converted):
    assert run("warm-up", converted, "--mode", "sparse").exit_code == 2


def test_a_checkpoint_that_was_not_converted_is_refused(run, source):
    result = run("warm-up", source, "--device", "cpu")
    assert result.exit_code == 3
    assert "quantization_config" in result.stderr


def test_a_prepared_folder_will_do(run, converted, tmp_path):
    path = shutil.copytree(converted, tmp_path / "converted")
    prepared = moequant.prepare(path, target="sm90").folder
    result = run("warm-up", prepared, "--device", "cpu", "--json")
    assert [kind["format"] for kind in result.document["layers"]] == ["nvfp4"]


def test_a_checkpoint_whose_experts_were_kept_is_refused(run, make_checkpoint, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'schema_version = 1\nsummary = "attention alone"\n'
        "[[rules]]\nmatch = '.*self_attn\\.[qkvo]_proj.*'\nformat = \"fp8_block\"\n"
    )
    path = moequant.convert(make_checkpoint(), tmp_path / "out", recipe=recipe).output
    result = run("warm-up", path, "--device", "cpu")
    assert result.exit_code == 4
    assert "by config.json no layer's experts are converted" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so(run, converted):
    result = run("warm-up", converted)
    assert result.exit_code == 4
    assert "device 'cuda' cannot be used" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_afterwards_no_number_of_tokens_compiles_anything(run, make_checkpoint, tmp_path):
    checkpoint = tmp_path / "converted"
    moequant.convert(make_checkpoint(), checkpoint, format="fp8_block")
    environment = {
        **os.environ,
        "MOEQUANT_CACHE_DIR": str(tmp_path / "ours"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }

    def kernels():
        folders = (tmp_path / "ours", tmp_path / "triton")
        return sorted(path for folder in folders for path in folder.rglob("*.cubin"))

    # Processes of their own: what this one compiled before would not come to the disk.
    command = [sys.executable, "-m", "moequant", "warm-up", checkpoint, "--max-tokens", "600"]
    subprocess.run(command, env=environment, check=True)
    before = kernels()
    assert before
    subprocess.run([sys.executable, "-c", CALLS, checkpoint], env=environment, check=True)
    assert kernels() == before
