from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

from moequant.dialects import REGISTRY

ROOT = Path(__file__).parents[3]


def test_the_entry_point_is_the_function():
    import moequant.integrations.vllm as plugin

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, function = points["vllm.general_plugins"]["moequant"].partition(":")
    assert module == plugin.__name__
    assert getattr(plugin, function) is plugin.register


def test_registering_twice_registers_once(engine):
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        get_quantization_config,
    )

    from moequant.integrations.vllm import register
    from moequant.integrations.vllm.config import MoequantConfig

    register()
    register()
    assert QUANTIZATION_METHODS.count("moequant") == 1
    assert get_quantization_config("moequant") is MoequantConfig


def test_registering_loads_neither_runtime_nor_kernels(stand_ins):
    code = f"""
import sys
sys.path.append({str(Path(stand_ins.__file__).parent)!r})
import stand_ins
stand_ins.install("0.33.0")
from moequant.integrations.vllm import register
register()
import torch
loaded = [n for n in sys.modules if n.startswith("moequant.")]
heavy = ("moequant.runtime", "moequant.kernels", "moequant.dialects", "moequant.formats")
assert not [n for n in loaded if n.startswith(heavy)], loaded
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_config_can_be_pickled_for_workers(engine):
    made = engine.config(REGISTRY["fp8"].quantization_config({}, []))
    copy = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert type(copy) is type(made)
    assert copy.stated == made.stated


def test_models_see_the_name_of_the_checkpoints_own_config(engine):
    """Models of vLLM choose how they load by it: gpt-oss, for one."""
    names = {
        dialect: engine.config(REGISTRY[dialect].quantization_config(formats, [])).get_name()
        for dialect, formats in {
            "fp8": {},
            "gpt-oss": {},
            "compressed-tensors": {"model.layers.0.mlp.experts.0.down_proj": "nvfp4"},
            "modelopt": {"model.layers.0.mlp.experts.0.down_proj": "nvfp4"},
        }.items()
    }
    assert names == {
        "fp8": "fp8",
        "gpt-oss": "gpt_oss_mxfp4",
        "compressed-tensors": "compressed-tensors",
        "modelopt": "modelopt_fp4",
    }
