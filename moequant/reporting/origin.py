"""What moequant.json says of how a checkpoint was made, and a command that makes it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.conversion import recorded_recipe
from moequant.conversion.reproduce import conversion_command, recipe_toml
from moequant.errors import MoequantError
from moequant.storage.documents import object_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moequant.conversion import Recipe

_SOURCE = ("repository", "revision", "commit", "config_sha256", "sample_sha256")


def describe_origin(
    record: Mapping[str, Any], *, source: str | None, output: str
) -> dict[str, Any]:
    """What a moequant.json says, as plain data; what it lacks, or is of another type, is None.

    Args:
        record: the parsed file, which may have been edited.
        source: the source as the user calls it, for the command; None if not known.
        output: the directory, for the command.

    Returns:
        `moequant`, `torch`, `plan_sha256`; of the `source` its origin on the hub, digests and the
        `bytes` of its files; SHA-256 of `statistics` and `activation_scales`; `recipe`, its TOML
        text and summary; `command`; `files`, each with bytes and SHA-256; `quantizers`;
        `gptq_errors`.
    """
    recipe = _recipe(record)
    found = object_at(record, "source")
    made_from = {key: _text(found.get(key)) for key in _SOURCE}
    return {
        **{key: _text(record.get(key)) for key in ("moequant", "torch", "plan_sha256")},
        "source": {**made_from, "bytes": _total_bytes(found.get("files"))},
        "statistics": _text(object_at(record, "statistics").get("sha256")),
        "activation_scales": _text(object_at(record, "activation_scales").get("sha256")),
        "recipe": recipe and {"summary": recipe.summary, "toml": recipe_toml(recipe)},
        "command": recipe and conversion_command(record, source or "SOURCE", output),
        "files": [*_files(record)],
        "quantizers": [
            {"name": _text(share.get("name")), "reason": _text(share.get("reason"))}
            for share in map(_table, _list(record.get("quantizers")))
        ],
        "gptq_errors": [*_gptq_errors(record)],
    }


def _recipe(record: Mapping[str, Any]) -> Recipe | None:
    try:
        return recorded_recipe(record)
    except MoequantError:
        return None


def _files(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("shards", "files"):
        for file, entry in object_at(record, key).items():
            size_bytes, digest = _table(entry).get("bytes"), _text(_table(entry).get("sha256"))
            if type(size_bytes) is int and digest is not None:
                yield {"file": file, "bytes": size_bytes, "sha256": digest}


def _gptq_errors(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in map(_table, _list(record.get("gptq_errors"))):
        ratio = entry.get("ratio")
        yield {
            "format": _text(entry.get("format")),
            "projection": _text(entry.get("projection")),
            "ratio": ratio if type(ratio) is float and ratio == ratio and ratio < 1e9 else None,
        }


def _total_bytes(files: object) -> int | None:
    sizes = [_table(entry).get("bytes") for entry in _table(files).values()]
    whole = [size_bytes for size_bytes in sizes if type(size_bytes) is int]
    return sum(whole) if whole and len(whole) == len(sizes) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
