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
from pathlib import Path
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.models import find_architecture, language_section
from moequant.models.cached_numbers import numbers_of_heads, numbers_of_latent, tokens_kept
from moequant.storage.checkpoint import Checkpoint
from moequant.weights.converted import described_architectures

if TYPE_CHECKING:
    from collections.abc import Iterable

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
            kv_cache=batch * self._kv_cache_bytes(context),
        )

    def _kv_cache_bytes(self, context: float) -> float:
        """Bytes of the keys and values of one sequence."""
        try:
            kept = tokens_kept(self._config, self._moe.layers)
            is_latent = self._config.get("kv_lora_rank") is not None
            numbers = (numbers_of_latent if is_latent else numbers_of_heads)(self._config)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        return _KV_BYTES * numbers * sum(min(tokens, context) for tokens in kept)


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
