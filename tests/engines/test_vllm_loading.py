"""vLLM's own models and loader fill the plug-in's parameters: on a CPU, without its kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from plug_in_ways import SINGLE_WAYS

from moequant.conversion import convert
from moequant.preparation import prepare

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]

WAYS = [
    *(("qwen3_moe", *way) for way in SINGLE_WAYS),
    ("mixtral", "nvfp4", "compressed-tensors"),
    ("deepseek_v3", "fp8_block", "fp8"),
    ("gpt_oss", "mxfp4", "gpt-oss"),
]
# vLLM has no kernels for MLA on a CPU, and makes layers only of attention that it has.
SETTINGS = {
    **json.loads((Path(__file__).parent / "offline.json").read_text()),
    "VLLM_PLUGINS": "",
    "VLLM_MLA_DISABLE": "1",
}
CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


@pytest.fixture
def load(make_checkpoint, tmp_path):
    """load(model, format, dialect, target): what vLLM and load_on_cpu.py print."""

    def load(model, format, dialect, *target):
        source = make_checkpoint(model_type=model, config={"architectures": [CLASSES[model]]})
        path = convert(source, tmp_path / "out", format=format, dialect=dialect).output
        for name in target:
            prepare(path, target=name)
        said = run("load_on_cpu.py", path, *target)
        layers = 1 if model == "deepseek_v3" else 2
        assert f"{layers} layers are equal" in said
        assert "a second loading is refused: " in said
        assert "weights are loaded again" in said
        return said

    return load


def run(script, *arguments):
    """What a script beside this file prints, once it has ended well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).parent / script, *arguments],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(("model", "format", "dialect"), WAYS)
def test_vllm_loads_the_experts_of_our_files(load, model, format, dialect):
    assert f"moequant runs routed experts in {format}" in load(model, format, dialect)


@pytest.mark.parametrize(
    ("model", "format", "dialect"),
    [("deepseek_v3", "fp8_block", "fp8"), ("gpt_oss", "mxfp4", "gpt-oss")],
)
def test_vllm_takes_prepared_experts_as_they_are(load, model, format, dialect):
    assert "prepared for sm90) by its backend" in load(model, format, dialect, "sm90")


@pytest.mark.parametrize(
    ("format", "arguments"),
    [
        ("nvfp4", ()),
        ("nvfp4", ("--ep",)),
        ("fp8_block", ("--ep",)),
        # Sent as they are, and in FP8.
        *(
            (format, ("--ep", "--send", form))
            for format in ("nvfp4", "w4a8", "fp8_block")
            for form in ("rows", "batches")
        ),
        ("fp8_block", ("--ep", "--send", "rows", "--idle")),
        ("fp8_block", ("--ep", "--send", "batches", "--idle")),
    ],
)
def test_data_parallel_ranks_get_what_one_would_return(
    make_checkpoint, tmp_path, format, arguments
):
    source = make_checkpoint(model_type="qwen3_moe")
    path = convert(source, tmp_path / "out", format=format).output
    said = run("data_parallel_on_cpu.py", path, *arguments)
    assert "rank 0: " in said
    assert "rank 1: " in said
