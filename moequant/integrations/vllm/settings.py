"""Settings of vLLM that the plug-in does not serve: said before anything is loaded.

What is found is said with what to do about it, as "finding: remedy".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.envs
from vllm.logger import init_logger

from moequant.errors import UnsupportedError
from moequant.integrations.vllm.name import NAME, WITHOUT
from moequant.integrations.vllm.parallelism import GATHERING, SENDING, sends_tokens
from moequant.integrations.vllm.versions import loads_itself, pads_sequences
from moequant.runtime.activations import FP8_TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = init_logger("vllm.moequant")

_FROM_FILES = (
    "auto",
    "dummy",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
)
"""Load formats by which vLLM fills parameters from a checkpoint's files and packs experts then.

By others it restores finished parameters, or a loader that is not vLLM's own decides.
"""
_OF_VLLMS_EXPERTS = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_BACKEND",
    "VLLM_HUMMING_MOE_GEMM_TYPE",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_FLASHINFER_MOE_FP4",
    "VLLM_USE_FLASHINFER_MOE_FP8",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
)
"""Variables of either version that choose among vLLM's quantized experts, or their activations.

Not those that linear layers read, too, such as VLLM_TEST_FORCE_FP8_MARLIN.
"""
_ZERO, _MTP_ALGORITHM = "zero_expert_type", "mtp_quant_algo"
"""Fields of config.json: of LongCat-Flash, and of HY-V4 in vLLM 0.33.0."""
_OTHER_ACTIVATIONS = (
    'or choose others, such as --additional-config \'{"moequant": {"activations": "fp8_token"}}\''
)


def check_served(name: str, layer: Any, vllm_config: Any, *, activations: str) -> None:
    """Check that vLLM's settings are served for a layer of routed experts.

    Args:
        name: of the layer.
        layer: a `RoutedExperts` of vLLM, of which `moe_config` is set.
        vllm_config: vLLM's `VllmConfig`.
        activations: the user's choice.

    Raises:
        UnsupportedError: they are not; says all that is in the way.
    """
    found = [*_of_parallelism(layer, vllm_config), *_of_settings(vllm_config)]
    if loads_itself(layer):
        found.append("models by --model-impl transformers in this vLLM: leave it out")
    if activations == FP8_TENSOR:
        found += _of_padding(layer, vllm_config)
    _refuse(f"{name}: ", found)


def check_settings(vllm_config: Any) -> None:
    """Check vLLM's settings alone, by which models may choose other experts than are given to us.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        UnsupportedError: they are not served; says all that is in the way.
    """
    _refuse("", _of_settings(vllm_config))


def warn_of_variables() -> None:
    """Log which variables that are on have no effect on the experts that moequant runs.

    They are not refused: experts that a checkpoint keeps unquantized, and those of a draft model,
    may be vLLM's.
    """
    if variables := [*filter(_is_on, _OF_VLLMS_EXPERTS)]:
        logger.warning_once(
            "%s: without effect on routed experts that moequant runs; unset it, or choose for "
            "those by --additional-config",
            ", ".join(variables),
        )


def _refuse(where: str, findings: Iterable[str]) -> None:
    if found := list(findings):
        raise UnsupportedError(
            f"{where}--quantization {NAME} does not serve {'; '.join(found)}, {WITHOUT}"
        )


def _of_parallelism(layer: Any, vllm_config: Any) -> Iterator[str]:
    parallel = layer.moe_config.moe_parallel_config
    if parallel.enable_eplb:
        yield "expert load balancing: leave out --enable-eplb"
    gathers = parallel.all2all_backend == GATHERING
    if parallel.dp_size > 1 and not gathers and not sends_tokens(parallel):
        yield (
            f"data parallel {parallel.dp_size} with --all2all-backend {parallel.all2all_backend}: "
            f"leave --all2all-backend out, or name {GATHERING}, or {' or '.join(SENDING)} with "
            "--enable-expert-parallel"
        )
    if sends_tokens(parallel) and layer.moe_config.in_dtype != torch.bfloat16:
        yield (
            f"{parallel.all2all_backend} with tokens in {layer.moe_config.in_dtype}, as DeepEP "
            "returns bfloat16: start with --dtype bfloat16"
        )
    if parallel.pcp_size > 1:
        yield f"prefill context parallel {parallel.pcp_size}: leave it out"
    if sends_tokens(parallel) and vllm_config.parallel_config.use_ubatching:
        yield "dual batch overlap: leave out --enable-dbo and --ubatch-size"
    if parallel.dp_size > 1 and not sends_tokens(parallel) and _of_model(vllm_config, _ZERO):
        yield (
            f"data parallel {parallel.dp_size} of a model with zero experts, as vLLM gathers the "
            "tokens of all ranks before it routes them, but adds the outputs of zero experts to "
            f"those of one rank: leave it out, or name --all2all-backend {' or '.join(SENDING)} "
            "with --enable-expert-parallel"
        )


def _of_model(vllm_config: Any, field: str) -> Any:
    """A field of the model's config.json; None without it."""
    model = vllm_config.model_config
    return None if model is None else getattr(model.hf_config, field, None)


def _of_settings(vllm_config: Any) -> Iterator[str]:
    kernels, offload = vllm_config.kernel_config, vllm_config.offload_config
    if vllm_config.lora_config is not None:
        yield "LoRA: leave out --enable-lora"
    if kernels.moe_backend != "auto":
        yield (
            f"--moe-backend {kernels.moe_backend}, or moe_backend of --speculative-config, which "
            "names experts of vLLM: leave it out"
        )
    if vllm.envs.VLLM_BATCH_INVARIANT:
        yield (
            "batch invariance, as the order in which kernels add depends on how many tokens a "
            "step has: unset VLLM_BATCH_INVARIANT"
        )
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        yield "weights offloaded to the host: leave offloading out"
    yield from _of_loading(vllm_config)


def _is_on(variable: str) -> bool:
    """Whether the user sets a variable, which this version of vLLM may lack, and not to off."""
    envs = vllm.envs
    known = variable in envs.environment_variables
    return known and envs.is_set(variable) and bool(getattr(envs, variable))


def _of_loading(vllm_config: Any) -> Iterator[str]:
    """Ways to load weights, and to load them again."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if model is not None and model.quantization_config is not None:
        yield "quantization while loading: leave out --quantization-config"
    if model is not None and model.enable_sleep_mode:
        yield "sleep mode, which does not see packed experts: leave it out"
    if vllm_config.weight_transfer_config is not None:
        yield "weights that are sent to the server: leave out --weight-transfer-config"
    if load_format not in _FROM_FILES:
        yield (
            f"--load-format {load_format}, after which experts may not be packed: load the "
            f"checkpoint from its own files, by one of {', '.join(_FROM_FILES)}"
        )
    algorithm, speculation = _of_model(vllm_config, _MTP_ALGORITHM), vllm_config.speculative_config
    if speculation is not None and speculation.method == "mtp" and str(algorithm).upper() == "FP8":
        yield (
            f"speculation by layers that {_MTP_ALGORITHM} of config.json says to be in FP8, whose "
            "experts vLLM runs: leave out --speculative-config"
        )


def _of_padding(layer: Any, vllm_config: Any) -> Iterator[str]:
    """What gives experts rows that hold no token of a request, which one scale of all would cover.

    They hold whatever was in memory, so that results would depend on it, and be NaN by one NaN.
    """
    ranks = layer.moe_config.moe_parallel_config.dp_size
    mode = vllm_config.compilation_config.cudagraph_mode.name
    what = f"activations {FP8_TENSOR}, one scale for all rows of a step, with"
    if mode != "NONE":
        yield (
            f"{what} CUDA graphs (cudagraph_mode {mode}), which pad steps to sizes that were "
            f"captured: start with --enforce-eager, {_OTHER_ACTIVATIONS}"
        )
    if ranks > 1:
        yield (
            f"{what} data parallel {ranks}, whose ranks pad steps, and run steps without a request "
            f"while others have some: leave --data-parallel-size out, {_OTHER_ACTIVATIONS}"
        )
    if pads_sequences(vllm_config):
        yield (
            f"{what} sequence parallelism, which pads steps to multiples of tensor parallel "
            f"{vllm_config.parallel_config.tensor_parallel_size}: leave enable_sp out of "
            f"--compilation-config, {_OTHER_ACTIVATIONS}"
        )
