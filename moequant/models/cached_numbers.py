"""What a KV cache holds by config.json: numbers of a token in a layer, and tokens in each layer.

Which models these rules are right for, and in which dtype numbers are kept, callers know.
"""

from __future__ import annotations

from math import inf
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEY_AND_VALUE = 2
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")
_WITH_WINDOW = ("sliding_attention", "chunked_attention")
_WITHOUT_CACHE = ("linear_attention", "conv", "mamba", "moe", "mlp")
_WINDOWS = ("sliding_window", "attention_chunk_size")


def numbers_of_heads(section: Mapping[str, Any], ranks: int = 1) -> int:
    """Numbers in the keys and values of a token in one layer, on the rank that has the most.

    Args:
        section: the language model's part of config.json.
        ranks: tensor-parallel ranks, among which heads are divided; where there are more ranks than
            heads, each has one.

    Raises:
        CheckpointError: a size that it takes is no positive integer.
    """
    head_dim = section.get("head_dim")
    if head_dim is None:
        head_dim = _size(section, "hidden_size") // _size(section, "num_attention_heads")
    heads = section.get("num_key_value_heads") or section.get("num_attention_heads")
    heads = _positive("num_key_value_heads", heads)
    return -(-heads // min(ranks, heads)) * _KEY_AND_VALUE * _positive("head_dim", head_dim)


def numbers_of_latent(section: Mapping[str, Any]) -> int:
    """Numbers of a token in one layer of multi-head latent attention, the same on every rank.

    They are a latent vector and a rotary key; a part whose size is null or 0 does not exist.

    Args:
        section: the language model's part of config.json.

    Raises:
        CheckpointError: a size is no positive integer.
    """
    return sum(_size(section, key) for key in _LATENT if section.get(key) not in (None, 0))


def tokens_kept(section: Mapping[str, Any], layers: int) -> list[float]:
    """Of how many of the last tokens each layer keeps keys and values.

    Args:
        section: the language model's part of config.json.
        layers: number of layers, without those for multi-token prediction.

    Returns:
        For each layer its window; `inf` for a layer that keeps all, as one of an unknown kind is
        taken to do; 0 for one without keys and values. All keep all if there is no `layer_types`;
        there are fewer entries than layers if that has fewer.

    Raises:
        CheckpointError: a window is no positive integer.
    """
    kinds = section.get("layer_types")
    if not isinstance(kinds, list):
        return [inf] * layers
    windows = [_size(section, key) for key in _WINDOWS if section.get(key)]
    window = windows[0] if windows else inf
    return [
        0 if kind in _WITHOUT_CACHE else window if kind in _WITH_WINDOW else inf
        for kind in kinds[:layers]
    ]


def _size(section: Mapping[str, Any], key: str) -> int:
    return _positive(key, section.get(key))


def _positive(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"config.json: {key} is {show(value)}, but must be a positive integer to know the size "
            "of the KV cache; fetch the checkpoint again"
        )
    return value
