"""What engines call the modules of a checkpoint: linear layers that they merge, renamed models.

Engines look up the merged layer in a quantization_config, so a list may name it. Sources: vLLM
0.33.0, `packed_modules_mapping` of its models; SGLang 0.5.23, models/deepseek_v2.py.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moequant.dialects.names import is_expert

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_MERGED = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
}
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
"""The projections to the latent space of MLA."""
_MERGED_IN_VLLM = _MERGED | dict.fromkeys(LATENT, "fused_qkv_a_proj")
_MERGED_IN_SGLANG = _MERGED | dict.fromkeys(LATENT, "fused_qkv_a_proj_with_mqa")

# vLLM renames the language model of a vision model, and plain names in lists with it.
_RENAMED = ("model.language_model.", "language_model.model.")


def in_vllm(name: str) -> str:
    """A module's name in vLLM, apart from merged layers."""
    here, there = _RENAMED
    return there + name.removeprefix(here) if name.startswith(here) else name


def names_of(module: str) -> tuple[str, ...]:
    """A module's names, where it is in the language model of a vision model both of these."""
    here, there = _RENAMED
    if module.startswith(there):
        return module, here + module.removeprefix(there)
    return tuple(dict.fromkeys((module, in_vllm(module))))


def merged_in_vllm(module: str) -> str:
    """The layer into which vLLM merges a linear layer; itself if into none, as an expert's."""
    return _merged(module, _MERGED_IN_VLLM)


def merged_in_sglang(module: str) -> str:
    """The layer into which SGLang merges a linear layer; itself if into none, as an expert's."""
    return _merged(module, _MERGED_IN_SGLANG)


def merged_layers(modules: Iterable[str], merged_in: Callable[[str], str]) -> set[str]:
    """The layers into which an engine merges two or more of `modules`.

    Args:
        modules: linear layers, as files name them.
        merged_in: `merged_in_vllm` or `merged_in_sglang`.
    """
    parts = Counter(merged for m in modules if (merged := merged_in(m)) != m)
    return {merged for merged, number in parts.items() if number > 1}


def with_merged_layers(
    kept: Collection[str], converted: Iterable[str], *merged_in: Callable[[str], str]
) -> set[str]:
    """Kept modules, and the layers into which engines merge them and nothing else.

    Args:
        kept: modules that stay as they are.
        converted: the other linear layers.
        merged_in: for each engine, `merged_in_vllm` or `merged_in_sglang`.
    """
    found, others = {*kept}, [*converted]
    for merge in merged_in:
        found |= merged_layers(kept, merge) - {*map(merge, others)}
    return found


def _merged(module: str, merged: Mapping[str, str]) -> str:
    parent, dot, leaf = module.rpartition(".")
    return module if is_expert(module) else f"{parent}{dot}{merged.get(leaf, leaf)}"
