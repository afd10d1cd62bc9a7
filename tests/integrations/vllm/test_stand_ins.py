"""The stand-ins have the signatures of vLLM 0.22.1, where its sources are.

MOEQUANT_VLLM_SOURCES names the folder that holds `vllm`, such as a site-packages; nothing of it is
imported.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

import pytest

_QUANTIZATION = "model_executor/layers/quantization"
_MOE = "model_executor/layers/fused_moe"
SAME = {
    "register_quantization_config": f"{_QUANTIZATION}/__init__.py",
    "get_quantization_config": f"{_QUANTIZATION}/__init__.py",
    "is_layer_skipped": f"{_QUANTIZATION}/utils/quant_utils.py",
    "QuantizationConfig.get_quant_method": f"{_QUANTIZATION}/base_config.py",
    "QuantizationConfig.override_quantization_method": f"{_QUANTIZATION}/base_config.py",
    "Fp8Config.from_config": f"{_QUANTIZATION}/fp8.py",
    "GptOssMxfp4Config.get_name": f"{_QUANTIZATION}/mxfp4.py",
    "ModelOptNvFp4Config.override_quantization_method": f"{_QUANTIZATION}/modelopt.py",
    "ModelOptMxFp8Config.override_quantization_method": f"{_QUANTIZATION}/modelopt.py",
    "CompressedTensorsConfig.get_scheme_dict": (
        f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py"
    ),
    "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map": (
        f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py"
    ),
    "FusedMoEMethodBase.__init__": f"{_MOE}/fused_moe_method_base.py",
    "FusedMoEMethodBase.maybe_roundup_sizes": f"{_MOE}/fused_moe_method_base.py",
    "FusedMoE.weight_loader": f"{_MOE}/layer.py",
    "FusedMoE._map_global_expert_id_to_local_expert_id": f"{_MOE}/layer.py",
}
"""Where vLLM has them."""
METHODS = ("apply", "maybe_roundup_sizes", "process_weights_after_loading")


@pytest.fixture(scope="module")
def sources():
    folder = os.environ.get("MOEQUANT_VLLM_SOURCES")
    if folder is None:
        pytest.skip("MOEQUANT_VLLM_SOURCES does not name a folder with vLLM's sources")
    return Path(folder) / "vllm"


def definitions(path, name):
    """Every definition of `f` or `C.f` in a file; overloads are several."""
    body = ast.parse(path.read_text("utf-8")).body
    *classes, function = name.split(".")
    for wanted in classes:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted).body
    return [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function]


def parameters(node):
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


@pytest.mark.parametrize("name", SAME)
def test_a_stand_in_has_vllms_parameters(sources, stand_ins, name):
    ours = stand_ins
    for part in name.split("."):
        ours = inspect.getattr_static(ours, part) if inspect.isclass(ours) else getattr(ours, part)
    ours = getattr(ours, "__func__", ours)
    theirs = definitions(sources / SAME[name], name)[-1]
    assert list(inspect.signature(ours).parameters) == parameters(theirs)


@pytest.mark.parametrize("method", METHODS)
def test_the_method_has_vllms_parameters(sources, engine, method):
    from moequant.integrations.vllm.method import MoequantMoEMethod

    file, owner = f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase"
    if method == "process_weights_after_loading":
        file, owner = f"{_QUANTIZATION}/base_config.py", "QuantizeMethodBase"
    theirs = definitions(sources / file, f"{owner}.{method}")[-1]
    ours = inspect.signature(getattr(MoequantMoEMethod, method))
    assert list(ours.parameters) == parameters(theirs)


def test_arguments_of_a_layer_are_vllms(sources, stand_ins):
    theirs = definitions(sources / f"{_MOE}/layer.py", "FusedMoE.__init__")[-1]
    ours = inspect.signature(stand_ins.FusedMoE.__init__).parameters
    assert set(ours) <= set(parameters(theirs))


def test_create_weights_gets_vllms_arguments(sources, engine):
    from moequant.integrations.vllm.method import MoequantMoEMethod

    theirs = definitions(
        sources / f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase.create_weights"
    )[-1]
    ours = list(inspect.signature(MoequantMoEMethod.create_weights).parameters)
    assert ours[: len(parameters(theirs))] == parameters(theirs)


def test_activation_functions_are_vllms(sources, stand_ins):
    tree = ast.parse((sources / f"{_MOE}/activation.py").read_text("utf-8"))
    (theirs,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "MoEActivation")
    members = {
        n.targets[0].id: n.value.value
        for n in theirs.body
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)
    }
    assert {m.name: m.value for m in stand_ins.MoEActivation} == members


def test_vllm_runs_methods_within_an_operator_of_its_own(sources):
    """So that torch.compile does not see what a method does."""
    text = (sources / f"{_MOE}/runner/moe_runner.py").read_text("utf-8")
    assert 'op_name="moe_forward"' in text
    assert 'op_name="moe_forward_shared"' in text
    assert "self._quant_method.apply(" in text
