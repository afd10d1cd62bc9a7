"""Small stand-ins for what the plug-in uses of vLLM 0.22.1 and 0.33.0, if vLLM is not installed.

Names, signatures and the rules by which tensors are cut are vLLM's; the code is not.
test_stand_ins.py compares signatures with vLLM's sources where they are.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
from compressed_tensors.quantization import QuantizationArgs

QUANTIZATION_METHODS = ["fp8", "compressed-tensors"]
REGISTERED = {}
_CURRENT = []


# vllm.config, vllm.logger
def get_current_vllm_config():
    return _CURRENT[-1]


@contextmanager
def set_current_vllm_config(vllm_config):
    _CURRENT.append(vllm_config)
    yield
    _CURRENT.pop()


def init_logger(name):
    logger = logging.getLogger(name)
    logger.info_once = partial(_once, logger)
    return logger


def _once(logger, message, *args):
    said = logger.__dict__.setdefault("said", set())
    if (message, args) not in said:
        said.add((message, args))
        logger.info(message, *args)


# vllm.config.compilation
class CUDAGraphMode(Enum):
    NONE = 0
    FULL = 2


# vllm.model_executor.layers.quantization
def register_quantization_config(quantization):
    def wrapper(quant_config_cls):
        QUANTIZATION_METHODS.append(quantization)
        REGISTERED[quantization] = quant_config_cls
        return quant_config_cls

    return wrapper


def get_quantization_config(quantization):
    return REGISTERED[quantization]


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        return None

    def get_quant_method(self, layer, prefix):
        """Of all but routed experts: here a word that tests recognize."""
        return "vLLM's own method"


class Older:
    """What is so in vLLM 0.22.1 alone."""

    version = "0.22.1"

    @staticmethod
    def is_layer_skipped(prefix, ignored_layers, fused_mapping=None, *, skip_with_substr=False):
        return any(prefix in name for name in ignored_layers if "experts" in name)


class Newer:
    """What is so in vLLM 0.33.0 alone."""

    version = "0.33.0"

    @staticmethod
    def is_layer_skipped(prefix, ignored_layers, fused_mapping=None, *, match_mode="exact"):
        if match_mode == "suffix":
            return any(f".{prefix}".endswith(f".{name}") for name in ignored_layers)
        return any(prefix in name for name in ignored_layers if "experts" in name)


class Fp8Config(QuantizationConfig):
    def __init__(self, ignored_layers=None, store_dtype=None):
        super().__init__()
        self.ignored_layers = ignored_layers or []
        self.store_dtype = store_dtype
        self.ignored_layers_match_mode = "exact"

    @classmethod
    def from_config(cls, config):
        return cls(config.get("ignored_layers") or config.get("modules_to_not_convert"))

    @classmethod
    def get_name(cls):
        return "fp8"


class CompressedTensorsConfig(QuantizationConfig):
    def __init__(self, target_scheme_map, ignore, quant_format):
        super().__init__()
        self.target_scheme_map, self.ignore, self.quant_format = (
            target_scheme_map, ignore, quant_format,
        )  # fmt: skip

    @classmethod
    def from_config(cls, config):
        schemes = {}
        for group in config["config_groups"].values():
            arguments = {
                part: None if group[part] is None else QuantizationArgs.model_validate(group[part])
                for part in ("weights", "input_activations")
            }
            scheme = {**arguments, "format": group.get("format")}
            schemes |= dict.fromkeys(group["targets"], scheme)
        return cls(schemes, config.get("ignore", []), config.get("format"))

    def get_name(self):
        return "compressed-tensors"

    def _add_fused_moe_to_target_scheme_map(self):
        pass

    def get_scheme_dict(self, layer, layer_name=None):
        if layer_name in self.ignore:
            return None
        for target, scheme in self.target_scheme_map.items():
            if target in ("Linear", layer_name):
                return {**scheme, "format": scheme["format"] or self.quant_format}
        return None


class _ModelOptConfig(QuantizationConfig):
    def __init__(self, exclude_modules):
        super().__init__()
        self.exclude_modules = exclude_modules

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        return cls.name if cls.algorithm in hf_quant_cfg["quant_algo"].upper() else None

    @classmethod
    def from_config(cls, config):
        return cls(config.get("ignore", []))

    def get_name(self):
        return self.name

    def is_layer_excluded(self, prefix):
        return any(name in prefix for name in self.exclude_modules)


class ModelOptNvFp4Config(_ModelOptConfig):
    name, algorithm = "modelopt_fp4", "NVFP4"


class ModelOptMxFp8Config(_ModelOptConfig):
    name, algorithm = "modelopt_mxfp8", "MXFP8"


class GptOssMxfp4Config(QuantizationConfig):
    @classmethod
    def from_config(cls, config):
        return cls()

    @classmethod
    def get_name(cls):
        return "gpt_oss_mxfp4"


# vllm.model_executor.layers.fused_moe
_ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglustep", "silu_no_mul", "gelu_no_mul",
    "gelu_tanh_no_mul", "relu2_no_mul",
)  # fmt: skip


def _activations(*more):
    return Enum("MoEActivation", {name.upper(): name for name in (*_ACTIVATIONS, *more)})


Older.MoEActivation = _activations()
Newer.MoEActivation = _activations("situ", "swigluoai_uninterleave")


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel = None

    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
    ):
        return hidden_size, intermediate_size_per_partition


class _Layer(torch.nn.Module):
    """A layer of routed experts, as far as a method sees it."""

    def _build(
        self, moe_config, quant_config, prefix, *, apply_router_weight_on_input, params_dtype
    ):
        parallel, num_experts = moe_config.moe_parallel_config, moe_config.num_experts
        local = num_experts // parallel.ep_size
        begin = local * parallel.ep_rank
        self.quant_config = quant_config
        self.expert_map = None
        if parallel.ep_size > 1:
            self.expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
            self.expert_map[begin : begin + local] = torch.arange(local, dtype=torch.int32)
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.moe_config = moe_config
        self.quant_method = quant_config.get_quant_method(self, prefix)
        if isinstance(self.quant_method, str):
            return
        hidden, intermediate = self.quant_method.maybe_roundup_sizes(
            moe_config.hidden_dim,
            moe_config.intermediate_size // parallel.tp_size,
            params_dtype,
            parallel,
        )
        self.quant_method.create_weights(
            layer=self,
            num_experts=local,
            hidden_size=hidden,
            intermediate_size_per_partition=intermediate,
            params_dtype=params_dtype,
            weight_loader=self.weight_loader,
            global_num_experts=num_experts,
        )

    def _map_global_expert_id_to_local_expert_id(self, expert_id):
        return expert_id if self.expert_map is None else int(self.expert_map[expert_id])

    def weight_loader(
        self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False
    ):
        done = True
        if self.quant_config.get_name() == "gpt_oss_mxfp4":
            param.data[tuple(slice(0, n) for n in loaded_weight.shape)] = loaded_weight
        else:
            done = self._load(param, loaded_weight, weight_name, shard_id, expert_id)
        return done if return_success else None

    weight_loader.supports_moe_loading = True

    def _load(self, param, loaded, name, shard_id, expert_id):
        local = self._map_global_expert_id_to_local_expert_id(expert_id)
        if local == -1:
            return False
        place, kind = param.data[local], param.quant_method
        if "weight_shape" in name:
            place.copy_(loaded)
        elif "scale" in name and kind == "tensor":
            place[None].view(-1)[int(shard_id == "w3")] = loaded.reshape(())
        elif shard_id == "w2":
            whole = "scale" in name and kind == "channel"
            place.copy_(loaded if whole else self._cut(loaded, 1, place.shape[1]))
        else:
            halves = 2 if self.moe_config.is_act_and_mul else 1
            rows = place.shape[0] // halves
            begin = rows * (shard_id == "w3")
            place[begin : begin + rows].copy_(self._cut(loaded, 0, rows))
        return True

    def _cut(self, loaded, dim, size):
        return loaded.narrow(dim, size * self.moe_config.moe_parallel_config.tp_rank, size)


def _moe_config(sizes, tp_size, activation, **numbers):
    config = get_current_vllm_config()
    num_experts, hidden_size, intermediate_size = sizes
    return SimpleNamespace(
        num_experts=num_experts,
        hidden_dim=hidden_size,
        intermediate_size=intermediate_size,
        moe_parallel_config=config.parallel(tp_size),
        activation=activation,
        is_lora_enabled=config.lora_config is not None,
        moe_backend=config.kernel_config.moe_backend,
        **numbers,
    )


class FusedMoE(_Layer):
    """The layer of vLLM 0.22.1."""

    def __init__(
        self,
        num_experts,
        top_k,
        hidden_size,
        intermediate_size,
        params_dtype=None,
        quant_config=None,
        tp_size=None,
        prefix="",
        activation="silu",
        is_act_and_mul=True,
        has_bias=False,
        swiglu_limit=None,
        apply_router_weight_on_input=False,
        expert_mapping=None,
    ):
        super().__init__()
        self.expert_mapping = expert_mapping
        moe_config = _moe_config(
            (num_experts, hidden_size, intermediate_size),
            tp_size,
            Older.MoEActivation(activation),
            experts_per_token=top_k,
            is_act_and_mul=is_act_and_mul,
            has_bias=has_bias,
            swiglu_limit=swiglu_limit,
        )
        self._build(
            moe_config,
            quant_config,
            prefix,
            apply_router_weight_on_input=apply_router_weight_on_input,
            params_dtype=params_dtype,
        )


Older.FusedMoE = Older.RoutedExperts = FusedMoE


class RoutedExperts(_Layer):
    """The layer of vLLM 0.33.0."""

    def __init__(
        self,
        layer_name,
        params_dtype,
        moe_config,
        quant_config,
        ckpt_gate_proj_name="gate_proj",
        ckpt_down_proj_name="down_proj",
        ckpt_up_proj_name="up_proj",
        apply_router_weight_on_input=False,
    ):
        super().__init__()
        assert moe_config.is_act_and_mul == (ckpt_up_proj_name is not None)
        self.ckpt_gate_proj_name = ckpt_gate_proj_name
        self.ckpt_down_proj_name = ckpt_down_proj_name
        self.ckpt_up_proj_name = ckpt_up_proj_name
        self._build(
            moe_config,
            quant_config,
            layer_name,
            apply_router_weight_on_input=apply_router_weight_on_input,
            params_dtype=params_dtype,
        )


def FusedMoEFactory(  # noqa: N802 (vLLM's name)
    num_experts,
    top_k,
    hidden_size,
    intermediate_size,
    params_dtype=None,
    quant_config=None,
    tp_size=None,
    prefix="",
    swiglu_limit=None,
    swiglu_alpha=None,
    swiglu_beta=None,
    activation_situ_beta=None,
    activation_situ_linear_beta=None,
    apply_router_weight_on_input=False,
    activation="silu",
    has_bias=False,
    ckpt_names=("gate_proj", "down_proj", "up_proj"),
):
    """What makes it; vLLM returns what runs the layer, which has it."""
    moe_config = _moe_config(
        (num_experts, hidden_size, intermediate_size),
        tp_size,
        Newer.MoEActivation(activation),
        experts_per_token=top_k,
        is_act_and_mul=not activation.endswith("_no_mul"),
        has_bias=has_bias,
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta,
        activation_situ_beta=activation_situ_beta,
        activation_situ_linear_beta=activation_situ_linear_beta,
    )
    layer = RoutedExperts(
        prefix,
        params_dtype,
        moe_config,
        quant_config,
        *ckpt_names,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )
    return SimpleNamespace(routed_experts=layer)


Newer.RoutedExperts, Newer.FusedMoEFactory = RoutedExperts, staticmethod(FusedMoEFactory)


def named(version, name):
    """What vLLM of a version calls `name`; of a class `C.f` its function."""
    name, _, attribute = name.partition(".")
    found = getattr(VERSIONS[version], name, None) or globals()[name]
    return getattr(found, attribute) if attribute else found


VERSIONS = {kind.version: kind for kind in (Older, Newer)}
HOMES = {
    "vllm.config": ("get_current_vllm_config", "set_current_vllm_config"),
    "vllm.envs": (),
    "vllm.logger": ("init_logger",),
    "vllm.model_executor.layers.quantization": (
        "QUANTIZATION_METHODS", "get_quantization_config", "register_quantization_config",
    ),
    "vllm.model_executor.layers.quantization.base_config": ("QuantizationConfig",),
    "vllm.model_executor.layers.quantization.fp8": ("Fp8Config",),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors": (
        "CompressedTensorsConfig",
    ),
    "vllm.model_executor.layers.quantization.modelopt": (
        "ModelOptNvFp4Config", "ModelOptMxFp8Config",
    ),
    "vllm.model_executor.layers.quantization.mxfp4": ("GptOssMxfp4Config",),
    "vllm.model_executor.layers.quantization.utils.quant_utils": ("is_layer_skipped",),
    "vllm.model_executor.layers.fused_moe": ("FusedMoEMethodBase", "RoutedExperts"),
    "vllm.model_executor.layers.fused_moe.activation": ("MoEActivation",),
}  # fmt: skip
"""By module of vLLM, what it has here."""
MAKERS = {"0.22.1": "FusedMoE", "0.33.0": "FusedMoEFactory"}
"""What makes a layer."""


VARIABLES = ("VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_DEEPEPLL_NVFP4_DISPATCH")
"""Environment variables that the plug-in asks for, and both versions have."""


def _variable(envs, name):
    if name not in envs.environment_variables:
        raise AttributeError(name)
    return envs.environment_variables[name]()


def _number_of(variable):
    return int(os.environ.get(variable, "0"))


def install(version):
    """Make the modules of a version importable; returns their names."""
    made = {}
    homes = HOMES | {}
    homes["vllm.model_executor.layers.fused_moe"] += (MAKERS[version],)
    for home, names in homes.items():
        parts = home.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for name in names:
            setattr(made[home], name, named(version, name))
    for module in made.values():
        module.__path__ = []
    made["vllm"].__version__ = version
    made["vllm"].envs = made["vllm.envs"]
    envs = made["vllm.envs"]
    envs.VLLM_BATCH_INVARIANT = False
    envs.environment_variables = {name: partial(_number_of, name) for name in VARIABLES}
    envs.is_set = os.environ.__contains__
    envs.__getattr__ = partial(_variable, envs)
    sys.modules.update(made)
    return list(made)
