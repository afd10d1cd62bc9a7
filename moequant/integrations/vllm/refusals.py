"""What the plug-in does not serve: said before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.envs

from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import WHOLE
from moequant.integrations.vllm.name import NAME
from moequant.integrations.vllm.versions import loads_itself, pads_sequences
from moequant.runtime.activations import FP8_TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moequant.integrations.vllm.stored import RankSizes

_GATHERING = "allgather_reducescatter"
"""With it, vLLM gathers the tokens of all data-parallel ranks before it calls a method that has no
kernel of vLLM's, and adds and scatters what the ranks return."""
_SENDING = ("deepep_high_throughput", "deepep_low_latency")
"""With these, tokens are sent to the ranks of their experts: as rows, and in batches."""
_PACKED_BEFORE = ("sharded_state", "runai_streamer_sharded", "tensorizer")
"""Formats of which vLLM restores finished parameters, or packs nothing after loading."""
_WITHOUT = f"or start without --quantization {NAME}"
_ZERO, _MTP_ALGORITHM = "zero_expert_type", "mtp_quant_algo"
"""Fields of config.json: of LongCat-Flash, and of HY-V4 in vLLM 0.33.0."""
_OTHER_ACTIVATIONS = (
    'or choose others, such as --additional-config \'{"moequant": {"activations": "fp8_token"}}\''
)


def check_served(name: str, layer: Any, vllm_config: Any, *, activations: str) -> None:
    """Check that a layer of routed experts and vLLM's settings are served.

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
        found.append(f"models by --model-impl transformers in this vLLM: leave it out, {_WITHOUT}")
    if activations == FP8_TENSOR:
        found += _of_padding(layer, vllm_config)
    if found:
        raise UnsupportedError(f"{name}: --quantization {NAME} does not serve {'; '.join(found)}")


def check_settings(vllm_config: Any) -> None:
    """Check vLLM's settings alone, by which models may choose other experts than are given to us.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        UnsupportedError: they are not served; says all that is in the way.
    """
    if found := list(_of_settings(vllm_config)):
        raise UnsupportedError(f"--quantization {NAME} does not serve {'; '.join(found)}")


def _of_parallelism(layer: Any, vllm_config: Any) -> Iterator[str]:
    parallel = layer.moe_config.moe_parallel_config
    if parallel.enable_eplb:
        yield f"expert load balancing: leave out --enable-eplb, {_WITHOUT}"
    gathers = parallel.all2all_backend == _GATHERING
    if parallel.dp_size > 1 and not gathers and not sends_tokens(parallel):
        yield (
            f"data parallel {parallel.dp_size} with --all2all-backend {parallel.all2all_backend}: "
            f"leave --all2all-backend out, or name {_GATHERING}, or {' or '.join(_SENDING)} with "
            f"--enable-expert-parallel, {_WITHOUT}"
        )
    if sends_tokens(parallel) and layer.moe_config.in_dtype != torch.bfloat16:
        yield (
            f"{parallel.all2all_backend} with tokens in {layer.moe_config.in_dtype}, as DeepEP "
            f"returns bfloat16: start with --dtype bfloat16, {_WITHOUT}"
        )
    if parallel.pcp_size > 1:
        yield f"prefill context parallel {parallel.pcp_size}: leave it out, {_WITHOUT}"
    if sends_tokens(parallel) and vllm_config.parallel_config.use_ubatching:
        yield f"dual batch overlap: leave out --enable-dbo and --ubatch-size, {_WITHOUT}"
    if parallel.dp_size > 1 and not sends_tokens(parallel) and _of_model(vllm_config, _ZERO):
        yield (
            f"data parallel {parallel.dp_size} of a model with zero experts, whose tokens vLLM "
            "gathers before it routes them, and adds what those experts return to its own tokens: "
            f"leave it out, or name --all2all-backend {' or '.join(_SENDING)} with "
            f"--enable-expert-parallel, {_WITHOUT}"
        )


def _of_model(vllm_config: Any, field: str) -> Any:
    """A field of the model's config.json; None without it."""
    model = vllm_config.model_config
    return None if model is None else getattr(model.hf_config, field, None)


def sends_tokens(parallel: Any) -> bool:
    """Whether vLLM sends tokens to the ranks of their experts, by an all-to-all that is served.

    Args:
        parallel: vLLM's `FusedMoEParallelConfig`.
    """
    return parallel.all2all_backend in _SENDING and parallel.use_all2all_kernels


def _of_settings(vllm_config: Any) -> Iterator[str]:
    kernels, offload = vllm_config.kernel_config, vllm_config.offload_config
    if vllm_config.lora_config is not None:
        yield f"LoRA: leave out --enable-lora, {_WITHOUT}"
    if kernels.moe_backend != "auto":
        yield (
            f"--moe-backend {kernels.moe_backend}, or moe_backend of --speculative-config, which "
            f"names experts of vLLM: leave it out, {_WITHOUT}"
        )
    if vllm.envs.VLLM_BATCH_INVARIANT:
        yield (
            "batch invariance, as the order in which kernels add depends on how many tokens a "
            f"step has: leave out VLLM_BATCH_INVARIANT, {_WITHOUT}"
        )
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        yield f"weights offloaded to the host: leave offloading out, {_WITHOUT}"
    yield from _of_loading(vllm_config)


def _of_loading(vllm_config: Any) -> Iterator[str]:
    """Ways to load weights, and to load them again."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if model is not None and model.quantization_config is not None:
        yield f"quantization while loading: leave out --quantization-config, {_WITHOUT}"
    if model is not None and model.enable_sleep_mode:
        yield f"sleep mode, which does not see packed experts: leave it out, {_WITHOUT}"
    if vllm_config.weight_transfer_config is not None:
        yield f"weights that are sent to the server: leave out --weight-transfer-config, {_WITHOUT}"
    if load_format in _PACKED_BEFORE:
        yield (
            f"--load-format {load_format}, after which experts are not packed: load the checkpoint "
            f"from its own files, {_WITHOUT}"
        )
    algorithm, speculation = _of_model(vllm_config, _MTP_ALGORITHM), vllm_config.speculative_config
    if speculation is not None and speculation.method == "mtp" and str(algorithm).upper() == "FP8":
        yield (
            f"speculation by layers that {_MTP_ALGORITHM} of config.json says to be in FP8, whose "
            f"experts vLLM runs: leave out --speculative-config, {_WITHOUT}"
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


def check_hidden(name: str, hidden: int, needed: int, backend: str) -> None:
    """Check that tokens can be sent with as many columns as they have.

    Raises:
        UnsupportedError: vLLM would pad them.
    """
    if hidden != needed:
        raise UnsupportedError(
            f"{name}: --all2all-backend {backend} sends tokens of {needed} columns and not of "
            f"{hidden}, and --quantization {NAME} does not pad them; leave --all2all-backend out, "
            f"or name {_GATHERING}, {_WITHOUT}"
        )


def check_blocks(name: str, format: str, sizes: RankSizes) -> None:
    """Check that tensor parallelism cuts no block of weights that share a scale.

    Raises:
        UnsupportedError: it does.
    """
    block = max((size for size in get_format(format).block if size < WHOLE), default=1)
    if sizes.tp_size == 1 or sizes.intermediate % block == 0:
        return
    whole = sizes.intermediate * sizes.tp_size
    raise UnsupportedError(
        f"{name}: tensor parallel {sizes.tp_size} gives each rank {sizes.intermediate} of {whole} "
        f"intermediate columns, which cuts blocks of {block} of {format}; choose a "
        f"--tensor-parallel-size that leaves multiples of {block}, --enable-expert-parallel, "
        f"{_WITHOUT}"
    )


def check_biases(name: str, *, has_bias: bool, interleaved: bool, stacked: bool) -> None:
    """Check that biases, and rows of gate and up in turns, are those of gpt-oss' own files.

    Raises:
        UnsupportedError: other files have them, whose order of rows is not known.
    """
    if (has_bias or interleaved) and not stacked:
        what = "biases" if has_bias else "rows of gate and up in turns"
        raise UnsupportedError(
            f"{name}: experts with {what} are served in the dialect gpt-oss only; convert the "
            f"model into it: moequant convert SOURCE OUTPUT --dialect gpt-oss, {_WITHOUT}"
        )
