"""vLLM's own models and loader fill the plug-in's parameters: on a CPU, without its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moequant.conversion import convert
from moequant.dialects import REGISTRY

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]

DIALECTS = ("fp8", "compressed-tensors", "modelopt")
WAYS = [
    *(
        ("qwen3_moe", format, dialect)
        for dialect in DIALECTS
        for format in REGISTRY[dialect].carried
    ),
    ("mixtral", "nvfp4", "compressed-tensors"),
    ("deepseek_v3", "fp8_block", "fp8"),
    ("gpt_oss", "mxfp4", "gpt-oss"),
]
# vLLM has no kernels for MLA on a CPU, and makes layers only of attention that it has.
SETTINGS = {
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_MLA_DISABLE": "1",
}
CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


@pytest.mark.parametrize(("model", "format", "dialect"), WAYS)
def test_vllm_loads_the_experts_of_our_files(make_checkpoint, tmp_path, model, format, dialect):
    source = make_checkpoint(model_type=model, config={"architectures": [CLASSES[model]]})
    path = convert(source, tmp_path / "out", format=format, dialect=dialect).output
    script = Path(__file__).parent / "load_on_cpu.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, path],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    layers = 1 if model == "deepseek_v3" else 2
    assert f"{layers} layers are equal" in done.stdout
    assert f"moequant runs routed experts in {format}" in done.stdout + done.stderr
