"""The stand-ins have the signatures of vLLM's versions, and the plug-in uses what vLLM has.

MOEQUANT_VLLM_SOURCES names the folder that holds `vllm`, such as a site-packages, of a version that
the plug-in is written for; nothing of it is imported.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import moequant.integrations

_QUANTIZATION = "model_executor/layers/quantization"
_MOE = "model_executor/layers/fused_moe"
_COMPRESSED = f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py"
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
    "CompressedTensorsConfig.get_scheme_dict": _COMPRESSED,
    "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map": _COMPRESSED,
    "FusedMoEMethodBase.__init__": f"{_MOE}/fused_moe_method_base.py",
    "FusedMoEMethodBase.maybe_roundup_sizes": f"{_MOE}/fused_moe_method_base.py",
    "RoutedExperts.weight_loader": None,
    "RoutedExperts._map_global_expert_id_to_local_expert_id": None,
}
"""Where vLLM has them; None: where it has the layer."""
LACKED = {
    "0.22.1": {"VLLM_B12X_MOE_FP4_FORCE_A16"},
    "0.33.0": {
        "VLLM_FLASHINFER_MOE_BACKEND",
        "VLLM_USE_FLASHINFER_MOE_FP4",
        "VLLM_USE_FLASHINFER_MOE_FP8",
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
    },
}
"""Variables that the plug-in asks for and a version does not have."""
METHODS = ("apply", "maybe_roundup_sizes", "process_weights_after_loading")


@dataclass(frozen=True)
class Places:
    """Where a version has a layer of routed experts, and what makes one."""

    layer: str
    layer_class: str
    maker: str
    caller: str


PLACES = {
    "0.22.1": Places(
        f"{_MOE}/layer.py", "FusedMoE", "FusedMoE.__init__", f"{_MOE}/runner/moe_runner.py"
    ),
    "0.33.0": Places(
        f"{_MOE}/routed_experts.py", "RoutedExperts", "FusedMoEFactory", f"{_MOE}/routed_experts.py"
    ),
}
FIELDS = {
    ("config/vllm.py", "VllmConfig"): (
        "additional_config", "compilation_config", "kernel_config", "load_config", "lora_config",
        "model_config", "offload_config", "parallel_config", "speculative_config",
        "weight_transfer_config",
    ),
    ("config/compilation.py", "CompilationConfig"): ("cudagraph_mode", "pass_config"),
    ("config/compilation.py", "CUDAGraphMode"): ("NONE", "FULL"),
    ("config/parallel.py", "ParallelConfig"): ("tensor_parallel_size", "use_ubatching"),
    ("config/load.py", "LoadConfig"): ("load_format",),
    ("config/kernel.py", "KernelConfig"): ("moe_backend",),
    ("config/model.py", "ModelConfig"): ("hf_config", "quantization_config", "enable_sleep_mode"),
    ("config/offload.py", "OffloadConfig"): ("uva", "prefetch"),
    ("config/offload.py", "UVAOffloadConfig"): ("cpu_offload_gb",),
    ("config/offload.py", "PrefetchOffloadConfig"): ("offload_group_size",),
    (f"{_MOE}/config.py", "FusedMoEConfig"): (
        "moe_parallel_config", "activation", "has_bias", "in_dtype", "experts_per_token",
    ),
    (f"{_MOE}/config.py", "FusedMoEParallelConfig"): (
        "tp_size", "dp_size", "pcp_size", "enable_eplb", "all2all_backend", "use_all2all_kernels",
        "use_batched_activation_format",
    ),
    (f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase"): ("moe", "moe_kernel"),
    (f"{_QUANTIZATION}/fp8.py", "Fp8Config"): ("ignored_layers",),
    (f"{_QUANTIZATION}/base_config.py", "QuantizationConfig"): ("packed_modules_mapping",),
    (f"{_QUANTIZATION}/modelopt.py", "ModelOptQuantConfigBase"): ("is_layer_excluded",),
}  # fmt: skip
"""What the plug-in reads of vLLM's objects, by file and class."""
LAYER_FIELDS = {
    "0.22.1": (
        "expert_map", "apply_router_weight_on_input", "moe_config", "activation",
        "global_num_experts", "_expert_routing_tables", "expert_mapping",
    ),
    "0.33.0": (
        "expert_map", "apply_router_weight_on_input", "moe_config", "activation",
        "global_num_experts", "_expert_routing_tables", "ckpt_gate_proj_name",
        "ckpt_up_proj_name", "ckpt_down_proj_name",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sources:
    """Files of vLLM."""

    folder: Path
    version: str

    @property
    def places(self):
        return PLACES[self.version]

    def tree(self, file):
        return ast.parse((self.folder / file).read_text("utf-8"))

    def definition(self, file, name):
        """The definition of `f` or `C.f` in a file; of overloads the last."""
        body = self.tree(file).body
        *classes, function = name.split(".")
        for wanted in classes:
            body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted).body
        return [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function][-1]

    def fields(self, file, name):
        """Names that a class, or what it sets of itself, has."""
        (found,) = (
            n for n in self.tree(file).body if isinstance(n, ast.ClassDef) and n.name == name
        )
        for node in ast.walk(found):
            if isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield from _names_of(target)


def _names_of(target):
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Tuple):
        for element in target.elts:
            yield from _names_of(element)


@pytest.fixture(scope="module")
def sources():
    folder = os.environ.get("MOEQUANT_VLLM_SOURCES")
    if folder is None:
        pytest.skip("MOEQUANT_VLLM_SOURCES does not name a folder with vLLM's sources")
    path = Path(folder) / "vllm"
    version = re.search(r"^__version__ = .*'([\d.]+)", (path / "_version.py").read_text(), re.M)[1]
    return Sources(path, version)


@pytest.fixture(autouse=True)
def skip_other_versions(request):
    """An engine of another version than the sources has other signatures."""
    if "engine" in request.fixturenames and "sources" in request.fixturenames:
        wanted = request.getfixturevalue("sources").version
        found = request.getfixturevalue("engine").version
        if found != wanted:
            pytest.skip(f"stand-ins of vLLM {found}, but sources of {wanted}")


def parameters(node):
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def test_the_plug_in_is_written_for_the_versions_that_have_stand_ins(engine, stand_ins):
    from moequant.integrations.vllm.versions import VERSIONS

    assert tuple(stand_ins.VERSIONS) == VERSIONS == tuple(PLACES)


@pytest.mark.parametrize("name", SAME)
def test_a_stand_in_has_vllms_parameters(sources, stand_ins, name):
    ours = stand_ins.named(sources.version, name)
    ours = getattr(ours, "__func__", ours)
    file = SAME[name]
    if file is None:
        file, name = sources.places.layer, name.replace("RoutedExperts", sources.places.layer_class)
    theirs = sources.definition(file, name)
    assert list(inspect.signature(ours).parameters) == parameters(theirs)


@pytest.mark.parametrize("method", METHODS)
def test_the_method_has_vllms_parameters(sources, engine, method):
    from moequant.integrations.vllm.method import MoequantMoEMethod

    file, owner = f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase"
    if method == "process_weights_after_loading":
        file, owner = f"{_QUANTIZATION}/base_config.py", "QuantizeMethodBase"
    theirs = sources.definition(file, f"{owner}.{method}")
    ours = inspect.signature(getattr(MoequantMoEMethod, method))
    assert list(ours.parameters) == parameters(theirs)


def test_arguments_of_a_layer_are_vllms(sources, stand_ins):
    maker = sources.places.maker
    theirs = sources.definition(f"{_MOE}/layer.py", maker)
    ours = inspect.signature(stand_ins.named(sources.version, maker)).parameters
    assert set(ours) <= set(parameters(theirs))


def test_create_weights_gets_vllms_arguments(sources, engine):
    from moequant.integrations.vllm.method import MoequantMoEMethod

    theirs = sources.definition(
        f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase.create_weights"
    )
    ours = list(inspect.signature(MoequantMoEMethod.create_weights).parameters)
    assert ours[: len(parameters(theirs))] == parameters(theirs)


def test_activation_functions_are_vllms(sources, stand_ins):
    body = sources.tree(f"{_MOE}/activation.py").body
    (theirs,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == "MoEActivation")
    members = {
        n.targets[0].id: n.value.value
        for n in theirs.body
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)
    }
    ours = stand_ins.named(sources.version, "MoEActivation")
    assert {m.name: m.value for m in ours} == members


def test_every_activation_function_has_an_answer(sources, engine):
    """relu2 with a gate is the only one that is refused."""
    from moequant.integrations.vllm.activation import _FIXED, _OF_THE_MODEL

    members = {m.value for m in engine.activations()}
    assert members - {"relu2"} <= set(_FIXED) | set(_OF_THE_MODEL)


def test_names_that_the_plug_in_imports_are_vllms(sources):
    plugin = Path(moequant.integrations.__file__).parent / "vllm"
    wanted = {
        (node.module, alias.name)
        for file in plugin.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(wanted) > 10
    for module, name in wanted:
        base = sources.folder.parent / module.replace(".", "/")
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        assert re.search(rf"\b{name}\b", file.read_text("utf-8")), f"{module}.{name}"


@pytest.mark.parametrize(("file", "name"), FIELDS)
def test_fields_that_the_plug_in_reads_are_vllms(sources, file, name):
    assert set(FIELDS[file, name]) <= set(sources.fields(file, name))


def test_fields_of_a_layer_that_the_plug_in_reads_are_vllms(sources):
    found = set(sources.fields(sources.places.layer, sources.places.layer_class))
    assert set(LAYER_FIELDS[sources.version]) <= found


def test_variables_that_the_plug_in_reads_are_vllms(sources, engine):
    from moequant.integrations.vllm import settings

    text = (sources.folder / "envs.py").read_text("utf-8")
    assert "VLLM_BATCH_INVARIANT: bool" in text
    known = {name for name in settings._OF_VLLMS_EXPERTS if f"    {name}: " in text}
    assert known == set(settings._OF_VLLMS_EXPERTS) - LACKED[sources.version]


def test_one_version_alone_loads_layers_past_their_parameters(sources):
    load = sources.definition(sources.places.layer, f"{sources.places.layer_class}.load_weights")
    loader = "self" if sources.version == "0.22.1" else "param"
    assert f"= {loader}.weight_loader(" in ast.unparse(load)


def test_names_of_models_and_load_formats_are_vllms(sources, engine):
    from moequant.integrations.vllm import checkpoints, settings

    text = (sources.folder / "model_executor/model_loader/__init__.py").read_text("utf-8")
    loaders = dict(re.findall(r'"(\w+)": (\w+Loader)', text))
    served = {name: loaders[name] for name in settings._FROM_FILES}
    by_files = {"DefaultModelLoader", "DummyModelLoader", "RunaiModelStreamerLoader"}
    assert set(served.values()) == by_files
    assert {name for name, loader in loaders.items() if loader in by_files} == set(served)
    if sources.version == "0.33.0":
        models = [*(sources.folder / "models").rglob("*.py")]
        texts = [file.read_text("utf-8") for file in models]
        texts += [(sources.folder / "transformers_utils/config.py").read_text("utf-8")]
        ling = sources.folder / "model_executor/models/bailing_moe_v3.py"
        assert ".store_dtype" in ling.read_text("utf-8")
        for name in checkpoints._WITH_OWN_NVFP4:
            assert any(f"{name}=" in t or f'model_type = "{name}"' in t for t in texts), name
        assert any(settings._MTP_ALGORITHM in text for text in texts)


def test_one_version_alone_pads_for_sequence_parallelism(sources):
    found = set(sources.fields("config/compilation.py", "PassConfig"))
    assert ("enable_sp" in found) == (sources.version == "0.22.1")


def test_numbers_of_activation_functions_are_vllms(sources, engine):
    from moequant.integrations.vllm.versions import _ACTIVATION_NUMBERS

    theirs = set(sources.fields(f"{_MOE}/config.py", "FusedMoEConfig"))
    assert set(_ACTIVATION_NUMBERS[sources.version]) <= theirs
    assert {n for n in theirs if "swiglu" in n or "situ" in n} == set(
        _ACTIVATION_NUMBERS[sources.version]
    )


def test_vllm_calls_apply_with_arguments_that_the_method_has(sources, engine):
    from moequant.integrations.vllm.method import MoequantMoEMethod

    calls = [
        [keyword.arg for keyword in node.keywords]
        for node in ast.walk(sources.tree(sources.places.caller))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "apply"
        and ast.unparse(node.func.value).endswith("quant_method")
    ]
    (given,) = calls
    ours = list(inspect.signature(MoequantMoEMethod.apply).parameters)
    assert sorted(given) == sorted(ours[1:])


def test_vllm_runs_methods_within_an_operator_of_its_own(sources):
    """So that torch.compile does not see what a method does."""
    text = (sources.folder / f"{_MOE}/runner/moe_runner.py").read_text("utf-8")
    assert 'op_name="moe_forward"' in text
    assert 'op_name="moe_forward_shared"' in text
    operator = sources.definition(f"{_MOE}/runner/moe_runner.py", "_moe_forward")
    assert "_forward_impl(" in ast.unparse(operator)
    routed = ast.unparse(
        sources.definition(f"{_MOE}/runner/moe_runner.py", "MoERunner._apply_quant_method")
    )
    called = "_quant_method.apply(" if sources.version == "0.22.1" else "forward_modular("
    assert called in routed
