"""What a file of statistics says about itself: a JSON document in its safetensors metadata."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moequant.statistics.inputs import HIDDEN

METADATA_KEY = "moequant.statistics"
"""The record's name under `__metadata__`."""

_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Layer = Annotated[int, Field(ge=0, lt=1_000_000)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataRecord(_Strict):
    """What the model was run over.

    Attributes:
        sha256: digest of the token ids: each window as its length and its ids, int64.
        file_sha256: digest of the file they are from.
        windows: number of sequences.
        tokens: their tokens in total.
        window_tokens: the longest that a window may be.
        samples: documents in the file.
        chat_template: whether the tokenizer's chat template was applied to messages.
    """

    sha256: _Digest
    file_sha256: _Digest
    windows: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    window_tokens: _Count
    samples: Annotated[int, Field(ge=1)]
    chat_template: bool


class StatisticsRecord(_Strict):
    """The record of a file of statistics.

    Attributes:
        schema_version: of the file.
        moequant: version that wrote it.
        source: digests of the checkpoint, as in moequant.json.
        model_type: as in its config.json.
        architecture: name of its entry in the architecture table.
        experts: number of experts of a layer.
        top_k: experts that a token is routed to.
        hidden: channels of the hidden states, H.
        intermediate: channels between gate, up and down, I.
        layers: the layers with experts, in order.
        prior_tokens: what the pooled statistics count for, see `moequant.statistics.shrinkage`.
        hessian: whether second moments are there.
        data: what the model was run over.
        run: versions, device, dtype and threads, which decide the last bits.
        digests: SHA-256 of the tensors of each layer, by its index; of its second moments by
            "INDEX.second_moments".
    """

    schema_version: Literal[1] = 1
    moequant: str
    source: dict[str, Any]
    model_type: str
    architecture: str
    experts: _Count
    top_k: _Count
    hidden: _Count
    intermediate: _Count
    layers: Annotated[tuple[_Layer, ...], Field(min_length=1, strict=False)]
    prior_tokens: _Count
    hessian: bool
    data: DataRecord
    run: dict[str, str]
    digests: dict[str, _Digest]

    @model_validator(mode="after")
    def _check(self) -> StatisticsRecord:
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must be sorted, each once")
        if sorted(self.digests) != sorted(digest_names(self.layers, hessian=self.hessian)):
            raise ValueError("digests must be those of the layers")
        return self

    def channels(self, name: str) -> int:
        """Channels K of an input, `hidden` or `intermediate`."""
        return self.hidden if name == HIDDEN else self.intermediate


def digest_names(layers: tuple[int, ...], *, hessian: bool) -> list[str]:
    """The names under `digests`."""
    names = [str(layer) for layer in layers]
    return names + [moments_digest(layer) for layer in layers] if hessian else names


def moments_digest(layer: int) -> str:
    """The name of the digest of a layer's second moments."""
    return f"{layer}.second_moments"
