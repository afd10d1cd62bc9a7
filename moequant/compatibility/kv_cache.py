"""How many bytes the KV cache takes of a token, by config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

from moequant.compatibility.tables import read_table
from moequant.errors import CheckpointError
from moequant.models import dtype_in, language_section
from moequant.models.cached_numbers import numbers_of_heads, numbers_of_latent, tokens_kept

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        None if attention.toml does not know the model, or a number of config.json is missing or is
        no positive integer.
    """
    section = language_section(config)
    kind = _kinds().get(str(section.get("model_type", config.get("model_type"))))
    number_bytes = _DTYPE_BYTES.get(dtype_in(config) or "bfloat16")
    if kind is None or number_bytes is None:
        return None
    try:
        if kind == "latent":
            return _of_latent(section, layers, number_bytes)
        return _of_heads(section, layers, tp, number_bytes)
    except CheckpointError:
        return None


def _of_latent(section: Mapping[str, Any], layers: int, number_bytes: int) -> KvCache | None:
    # A size that is left out has a default, and an index keeps keys of its own.
    sizes = section.get("kv_lora_rank"), section.get("qk_rope_head_dim")
    if not all(sizes) or "index_head_dim" in section:
        return None
    return KvCache(token_bytes=layers * numbers_of_latent(section) * number_bytes)


def _of_heads(
    section: Mapping[str, Any], layers: int, tp: int, number_bytes: int
) -> KvCache | None:
    if not _are_layers_known(section, layers):
        return None
    layer_bytes = numbers_of_heads(section, tp) * number_bytes
    kept = tokens_kept(section, layers)
    with_all = kept.count(inf)
    return KvCache(
        token_bytes=with_all * layer_bytes,
        window_token_bytes=(layers - with_all) * layer_bytes,
        window=0 if with_all == layers else int(min(kept)),
    )


def _are_layers_known(section: Mapping[str, Any], layers: int) -> bool:
    """Whether config.json says of every layer that it attends to all tokens, or to which."""
    kinds, window = section.get("layer_types"), section.get("sliding_window")
    if kinds is None:
        # Without a list, a window is that of all layers or of none; which, models say differently.
        return not window or section.get("use_sliding_window") is False
    if not isinstance(kinds, list) or len(kinds) != layers:
        return False
    known = (_FULL, _SLIDING) if window else (_FULL,)
    return all(kind in known for kind in kinds)


@cache
def _kinds() -> dict[str, str]:
    entries = read_table("attention.toml")["attention"]
    return {name: entry["kind"] for entry in entries for name in entry["model_types"]}
