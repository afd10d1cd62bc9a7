"""Static caches: keys and values of all tokens, in memory that a model allocates once.

Sliding-window layers keep all tokens, and the mask alone is a window. Otherwise no CUDA graph could
replay a step: transformers' own static layer of such a kind branches on a count of the host and
copies an index from the host in each step.
"""

from __future__ import annotations

import functools
from inspect import signature
from typing import TYPE_CHECKING

from moequant.arguments import check_count
from moequant.compatibility.kv_cache import kv_cache
from moequant.device import free_bytes
from moequant.errors import MoequantError, UnsupportedError
from moequant.integrations.transformers_library import import_transformers
from moequant.units import size

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import Cache, PreTrainedModel

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls a cache among arguments and outputs, from 5.24 on, and before."""
DECODE_EAGERLY = (
    "load the model with enforce_eager=True, in `moequant generate` --enforce-eager, to decode "
    "without CUDA graphs"
)
"""What errors of decoding advise."""


@functools.cache
def cache_argument() -> str:
    """What the installed transformers calls the cache that `generate` is given."""
    method = import_transformers().GenerationMixin.prepare_inputs_for_generation
    new, old = CACHE_NAMES
    return new if new in signature(method).parameters else old


def name_of_cache(named: Collection[str]) -> str:
    """Which of some arguments, or fields of an output, is the cache."""
    return next(name for name in CACHE_NAMES if name in named)


def static_cache(model: PreTrainedModel, max_tokens: int, *, sequences: int = 1) -> Cache:
    """An empty cache for `max_tokens` tokens of each sequence, allocated by the first call.

    It takes the memory of `max_tokens` tokens in every layer, also in those with a sliding window.
    To use it again, call its method `reset`; graphs over it are then used again, too.

    Args:
        model: what it is for.
        max_tokens: of a prompt and its answer.
        sequences: how many the first call has at least; only its memory is checked for them.

    Raises:
        UnsupportedError: no static cache holds the states of this model's layers, or `max_tokens`
            is less than 1.
        MoequantError: the keys and values of so many tokens take more memory than the device has
            free. Of a model whose keys and values are not known, that is not checked.
    """
    check_static(model)
    check_count("max_tokens", max_tokens, 1)
    _check_memory(model, sequences * max_tokens)
    from transformers import cache_utils

    config = model.config.get_text_config(decoder=True)
    cache = cache_utils.StaticCache(config, max_cache_len=max_tokens)
    for index, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.StaticSlidingWindowLayer:
            cache.layers[index] = cache_utils.StaticLayer(max_cache_len=max_tokens)
    return cache


def why_not_static(model: PreTrainedModel) -> str | None:
    """Why no static cache holds the states of this model's layers; None if one does."""
    if not model._supports_default_dynamic_cache():
        return f"{type(model).__name__} has a cache of its own class"
    config = model.config.get_text_config(decoder=True)
    try:
        cache = import_transformers().StaticCache(config, max_cache_len=1)
    except KeyError as error:
        return f"transformers has no static cache for layers of type {error}"
    for layer in cache.layers:
        if not layer.is_compileable:
            return f"{type(layer).__name__}, a layer's cache, is not static"
    return None


def check_static(model: PreTrainedModel) -> None:
    """Check that a static cache holds the states of this model's layers.

    Raises:
        UnsupportedError: none does; says why.
    """
    reason = why_not_static(model)
    if reason is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has no static cache: {reason}; {DECODE_EAGERLY}"
        )


def _check_memory(model: PreTrainedModel, tokens: int) -> None:
    """Refuse a cache that the device cannot hold, by the least that it takes, if that is known."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    kv, free = kv_cache(model.config.to_dict(), layers, tp=1), free_bytes(model.device)
    if kv is None or free is None:
        return
    needed = tokens * (kv.token_bytes + kv.window_token_bytes)
    if needed > free:
        raise MoequantError(
            f"a static cache of {tokens} tokens takes {size(needed)}, but {model.device} has "
            f"{size(free)} free; ask for fewer tokens (--max-new-tokens) or sequences, or free "
            "memory"
        )
