"""What differs between the versions of vLLM that the plug-in is written for.

| | 0.22.1 | 0.33.0 |
|---|---|---|
| kept modules of an FP8 config | by whole names | as a field of the config says |
| a scheme of compressed-tensors | of gate_proj and so on | by the model's own names |
| numbers of an activation function | a limit | also those of swigluoai and situ |
| layers of the Transformers backend | load past their parameters' loaders | by them |
| tokens of a step, with `enable_sp` | padded to multiples of the ranks | there is none |
| a layer of routed experts | `FusedMoE`, alias `RoutedExperts` | `RoutedExperts` |

The last line needs nothing: the plug-in takes whatever is called `RoutedExperts`, and both have the
attributes that it reads.
"""

from __future__ import annotations

from typing import Any

import vllm

from moequant.errors import UnsupportedError
from moequant.integrations.vllm.name import NAME

_OLDER, _NEWER = "0.22.1", "0.33.0"
VERSIONS = (_OLDER, _NEWER)
"""Others may call the plug-in in another way, so they are refused."""

_ACTIVATION_NUMBERS = {
    _OLDER: ("swiglu_limit",),
    _NEWER: (
        "swiglu_limit",
        "swiglu_alpha",
        "swiglu_beta",
        "activation_situ_beta",
        "activation_situ_linear_beta",
    ),
}


def check_version() -> None:
    """Check that the installed vLLM is one that the plug-in is written for.

    Raises:
        UnsupportedError: it is another.
    """
    if _version() not in VERSIONS:
        raise UnsupportedError(
            f"vLLM {vllm.__version__}, but --quantization {NAME} is written for vLLM "
            f"{' and '.join(VERSIONS)}; install one of these, as pip install vllm=={_OLDER}, or "
            f"start without --quantization {NAME}"
        )


def name_matching(config: Any) -> dict[str, str]:
    """How an `Fp8Config` compares names with `ignored_layers`: arguments of `is_layer_skipped`."""
    return {} if _version() == _OLDER else {"match_mode": config.ignored_layers_match_mode}


def projections(layer: Any) -> list[str]:
    """Names of a layer's projections by which compressed-tensors looks up their schemes."""
    if _version() == _OLDER:
        return ["gate_proj", "up_proj", "down_proj"]
    # Without a gate vLLM takes up's name for the gate's, and None for up's.
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [name for name in names if name is not None]


def activation_numbers(moe: Any) -> dict[str, float | None]:
    """The numbers of a layer's activation function that its `FusedMoEConfig` has, by field."""
    return {name: getattr(moe, name) for name in _ACTIVATION_NUMBERS[_version()]}


def loads_itself(layer: Any) -> bool:
    """Whether a layer gives tensors to vLLM's loader without asking its parameters for theirs.

    That is so in the Transformers backend, which alone names an `expert_mapping`.
    """
    return _version() == _OLDER and layer.expert_mapping is not None


def pads_sequences(vllm_config: Any) -> bool:
    """Whether steps are padded for sequence parallelism, without CUDA graphs too."""
    if _version() != _OLDER:
        return False
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return ranks > 1 and bool(vllm_config.compilation_config.pass_config.enable_sp)


def _version() -> str:
    """The version of vLLM, without what names its build."""
    version: str = vllm.__version__
    return version.partition("+")[0]
