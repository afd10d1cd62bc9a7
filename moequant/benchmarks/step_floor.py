"""The bytes that a decoding step of a whole model cannot avoid reading.

    experts   of the routed experts that a batch is expected to choose, if every set of T is equally
              likely for every token: E * (1 - (1 - T / E) ** B) in each layer
    others    all other weights once, as they are stored: attention, norms, routers, shared experts
              and the output head; of the embedding a row per sequence, or all of it where it is the
              head, too
    kv_cache  the keys and values of earlier tokens in BF16, as small as the architecture allows:
              of multi-head latent attention the latent vector, of a sliding window its tokens; none
              for layers with linear attention, whose state does not grow

What is stored for multi-token prediction, images and sounds is not read. Activations, logits and
what is written are left out, being much smaller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError
from moequant.models import find_architecture, language_section
from moequant.storage.checkpoint import Checkpoint
from moequant.weights.converted import described_architectures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.models import Architecture, MoeConfig

_NOT_READ = ("vision", "audio", "mtp")
_EMBEDDING, _HEAD = "embedding", "lm_head"
_LAYER = re.compile(r"\.(\d+)\.")
_KV_BYTES = 2
"""Of an element of the cache: BF16."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of a decoding step; see the module."""

    experts: float
    others: int
    kv_cache: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.experts + self.others + self.kv_cache


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Bytes of the weights of a checkpoint, and rows of its embedding."""

    experts: int
    others: int
    embedding: int
    embedding_rows: int
    has_head: bool


class StepFloor:
    """The bytes of decoding steps of one checkpoint, from its config.json and headers.

    Args:
        checkpoint: a folder with a source or a converted checkpoint.
        architecture: a file as for `load_experts`.

    Raises:
        CheckpointError: not a checkpoint, or a config.json without the sizes.
        UnsupportedError: an unknown architecture.
    """

    def __init__(self, checkpoint: str | Path, *, architecture: str | Path | None = None) -> None:
        opened = Checkpoint.open(Path(checkpoint))
        own = described_architectures(opened.path, architecture)
        found = find_architecture(opened.config, own, names=opened.tensors)
        self._moe = found.read_config(opened.config)
        self._weights = _weigh(
            ((name, info.size_bytes, info.shape) for name, info in opened.tensors.items()),
            found,
            self._moe,
        )
        self._config = language_section(opened.config)
        self._path = opened.path

    def step(self, batch: int, context: float) -> StepBytes:
        """Bytes of a step of `batch` sequences, each of `context` tokens before it."""
        moe, weights = self._moe, self._weights
        chosen = 1 - (1 - moe.top_k / moe.experts) ** batch
        others = weights.others
        others += (
            round(weights.embedding / weights.embedding_rows * batch)
            if weights.has_head
            else weights.embedding
        )
        return StepBytes(
            experts=weights.experts * chosen,
            others=others,
            kv_cache=batch * sum(
                _token_bytes(self._config, self._path) * seen
                for seen in _tokens_seen(self._config, self._path, moe.layers, context)
            ),
        )  # fmt: skip


def _weigh(
    tensors: Iterable[tuple[str, int, tuple[int, ...]]],
    architecture: Architecture,
    moe: MoeConfig,
) -> _Weights:
    experts = others = embedding = 0
    rows, has_head = 1, False
    for name, size_bytes, shape in tensors:
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) in moe.optional_layers:
            continue
        # Every pattern of experts in the architecture table contains it.
        if ".experts." in name:
            experts += size_bytes
            continue
        role = architecture.classify(name).role if architecture.has_role_pattern(name) else ""
        has_head = has_head or role == _HEAD
        if role == _EMBEDDING:
            embedding += size_bytes
            rows = max(rows, shape[0])
        elif role not in _NOT_READ:
            others += size_bytes
    return _Weights(
        experts=experts,
        others=others,
        embedding=embedding,
        embedding_rows=rows,
        has_head=has_head,
    )


def _token_bytes(config: Mapping[str, Any], path: Path) -> int:
    """Bytes of the keys and values of a token in one layer."""
    latent = config.get("kv_lora_rank")
    if latent is not None:
        sizes = {"kv_lora_rank": latent, "qk_rope_head_dim": config.get("qk_rope_head_dim")}
        # Some have no part with positions.
        given = {name: size for name, size in sizes.items() if size not in (None, 0)}
        return sum(_positive(path, **given)) * _KV_BYTES
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
    if head_dim is None:
        hidden, heads = _positive(
            path, hidden_size=config.get("hidden_size"), num_attention_heads=heads
        )
        head_dim = hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * prod(_positive(path, num_key_value_heads=kv_heads, head_dim=head_dim)) * _KV_BYTES


def _positive(path: Path, **fields: object) -> list[int]:
    """The values of fields of config.json, which must be positive integers."""
    found = []
    for name, value in fields.items():
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{path / 'config.json'}: {name} is {value!r}, but must be a positive integer to "
                "know the size of the KV cache; fetch the checkpoint again"
            )
        found.append(value)
    return found


def _tokens_seen(config: Mapping[str, Any], path: Path, layers: int, context: float) -> list[float]:
    """How many tokens' keys and values a step reads in each layer."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return [context] * layers
    fields = {key: config.get(key) for key in ("sliding_window", "attention_chunk_size")}
    windows = _positive(path, **{key: value for key, value in fields.items() if value})
    window = min([context, *windows[:1]])
    seen = {"sliding_attention": window, "chunked_attention": window}
    without = ("linear_attention", "conv", "mamba", "moe", "mlp")
    return [0.0 if kind in without else seen.get(kind, context) for kind in kinds[:layers]]
