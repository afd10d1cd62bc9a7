"""How many bytes the KV cache takes of a token, by config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from moequant.compatibility.tables import read_table
from moequant.models import dtype_in, language_section

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEY_AND_VALUE = 2
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """What a rank keeps of the tokens of a sequence.

    Attributes:
        token_bytes: of every token, in the layers that attend to all.
        window_token_bytes: of each of the last `window` tokens, in the layers that attend to no
            others.
        window: how many those are; 0 without such layers.
    """

    token_bytes: int
    window_token_bytes: int = 0
    window: int = 0


def kv_cache(config: Mapping[str, Any], layers: int, tp: int) -> KvCache | None:
    """What each of `tp` tensor-parallel ranks keeps of a token, in the dtype of config.json.

    Heads of keys and values are divided among the ranks, and copied where there are more ranks; the
    latent vector of MLA is on every rank.

    Args:
        config: config.json.
        layers: number of layers, without those for multi-token prediction.
        tp: number of ranks.

    Returns:
        None if attention.toml does not know the model, or config.json lacks a number.
    """
    section = language_section(config)
    kind = _kinds().get(str(section.get("model_type", config.get("model_type"))))
    number_bytes = _DTYPE_BYTES.get(dtype_in(config) or "bfloat16")
    if kind is None or number_bytes is None:
        return None
    if kind == "latent":
        width = _number(section, "kv_lora_rank"), _number(section, "qk_rope_head_dim")
        if None in width or "index_head_dim" in section:
            return None
        return KvCache(token_bytes=layers * sum(filter(None, width)) * number_bytes)
    return _of_heads(section, layers, tp, number_bytes)


def _of_heads(
    section: Mapping[str, Any], layers: int, tp: int, number_bytes: int
) -> KvCache | None:
    heads, hidden = _number(section, "num_attention_heads"), _number(section, "hidden_size")
    kv_heads = _number(section, "num_key_value_heads") or heads
    size = _number(section, "head_dim") or (hidden // heads if heads and hidden else None)
    if kv_heads is None or size is None:
        return None
    layer_bytes = -(-kv_heads // min(tp, kv_heads)) * _KEY_AND_VALUE * size * number_bytes
    window = _number(section, "sliding_window")
    kinds = section.get("layer_types")
    if kinds is None:
        # Without a list, a window is that of all layers or of none; which, models say differently.
        is_off = section.get("use_sliding_window") is False
        return KvCache(token_bytes=layers * layer_bytes) if window is None or is_off else None
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {_FULL, _SLIDING}:
        return None
    sliding = kinds.count(_SLIDING)
    if sliding and window is None:
        return None
    return KvCache(
        token_bytes=(layers - sliding) * layer_bytes,
        window_token_bytes=sliding * layer_bytes,
        window=(window or 0) if sliding else 0,
    )


def _number(section: Mapping[str, Any], key: str) -> int | None:
    value = section.get(key)
    return value if type(value) is int and value > 0 else None


@cache
def _kinds() -> dict[str, str]:
    entries = read_table("attention.toml")["attention"]
    return {name: entry["kind"] for entry in entries for name in entry["model_types"]}
