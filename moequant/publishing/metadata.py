"""The front matter of the card: the source's, with what quantization changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant.dialects import REGISTRY as DIALECTS
from moequant.formats import CONVERTIBLE
from moequant.storage.model_card import split_card

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the source, and not true of what is made of it: its own base model, its measured results, and
# which model replaces it. The last is no field, but an option of huggingface_hub's class.
UNTRUE = (
    "base_model", "base_model_relation", "model-index", "eval_results", "model_name", "new_version",
    "ignore_metadata_errors",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SourceCard:
    """The card of a source, by README.md of a converted checkpoint.

    Attributes:
        metadata: its front matter.
        text: what follows that.
        sha256: digest in hex of the source's README.md; None if it has none.
        base_model: the base model of a card of ours, around which another is written.
        warnings: what is wrong with it.
    """

    metadata: dict[str, Any]
    text: str
    sha256: str | None
    base_model: str | None = None
    warnings: tuple[str, ...] = ()


NO_CARD = SourceCard(metadata={}, text="", sha256=None)


def read_card(data: bytes, *, recorded_sha256: str | None) -> SourceCard:
    """The source's card, by the bytes of a README.md, which may be a card of ours around it.

    Args:
        data: the file.
        recorded_sha256: digest in hex of the source's README.md by moequant.json, if it had one. A
            file of this digest is the source's, even if `push` wrote it.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    warnings = []
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        warnings.append(f"README.md: not UTF-8 ({error.reason}); other bytes are left out")
        text = data.decode("utf-8", errors="ignore")
    metadata, body = _parse(text, warnings)
    ours = None if sha256 == recorded_sha256 else split_card(body)
    if ours is None:
        return SourceCard(metadata=metadata, text=body, sha256=sha256, warnings=tuple(warnings))
    base = metadata.get("base_model")
    return SourceCard(
        metadata=metadata,
        text=ours[1],
        sha256=ours[0],
        base_model=base if isinstance(base, str) else None,
        warnings=tuple(warnings),
    )


def _parse(text: str, warnings: list[str]) -> tuple[dict[str, Any], str]:
    """Front matter and text of a card; of invalid front matter, a warning and none."""
    from huggingface_hub import RepoCard

    if not text.lstrip().startswith("---"):
        return {}, text
    # Its parsers (of YAML, of its own) raise errors without a common base class.
    try:
        card = RepoCard(text)
        return vars(card.data), card.text
    except Exception as error:
        why = " ".join(str(error).split())
        warnings.append(f"README.md: its front matter is no YAML that can be read: {why:.200}")
        return {}, text


def merged_metadata(
    source: SourceCard, *, base_model: str | None, quantized: bool, tags: Sequence[str]
) -> str:
    """The front matter of the new card as YAML.

    Args:
        source: the source's card, whose other fields stay: license, languages, pipeline.
        base_model: id of the source on the hub, if it is known.
        quantized: whether any weight is.
        tags: to add to the source's, of which those that name a format or a dialect are left out.
    """
    from huggingface_hub import ModelCardData

    # It reads its own methods by name, so a field of the same name would be called.
    fields = {
        k: v
        for k, v in source.metadata.items()
        if v is not None and k not in UNTRUE and not hasattr(ModelCardData, k)
    }
    if "language" in fields:
        fields["language"] = _languages(fields["language"])
    theirs = fields.pop("tags", None) or []
    listed = map(str, theirs if isinstance(theirs, list) else [theirs])
    kept = [tag for tag in listed if tag not in {*CONVERTIBLE, *DIALECTS}]
    fields = {"library_name": "transformers", **fields}
    fields["tags"] = list(dict.fromkeys([*kept, *tags]))
    if base_model is not None:
        fields["base_model"] = base_model
        if quantized:
            fields["base_model_relation"] = "quantized"
    return str(ModelCardData(**fields).to_yaml())


def _languages(value: object) -> object:
    """Norwegian, which YAML reads as a boolean, as text again."""
    if isinstance(value, list):
        return [_languages(one) for one in value]
    return "no" if value is False else value
