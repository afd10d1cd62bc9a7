"""Names by which people ask for a format, and what is said of names that no format has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moequant.errors import unknown_name

if TYPE_CHECKING:
    from collections.abc import Collection

_ALIASES = {
    # As config.json of DeepSeek-V3 and Qwen3-FP8 calls its blocks: quant_method = "fp8".
    "fp8": "fp8_block",
    # Presets of compressed-tensors with the same weights and the same activations.
    "fp8dynamic": "fp8_channel",
    "nvfp4a16": "nvfp4",
    "mxfp4a16": "mxfp4",
    "mxfp8a16": "mxfp8",
    "w4afp8": "w4a8",
    # As torch and config.json call it.
    "bfloat16": "bf16",
}
"""Other names of formats, in lower case and without separators."""

_SIMILAR = {
    "fp4": ("nvfp4", "mxfp4"),
    "int4": ("w4a8",),
    "w4a16": ("w4a8",),
    "awq": ("w4a8",),
    "gptq": ("w4a8",),
    "int8": ("fp8_channel",),
    "w8a8": ("fp8_channel",),
    "fp16": ("bf16",),
}
"""What comes nearest to names of formats that moequant does not write, likewise."""


def format_name(text: str, known: Collection[str]) -> str:
    """The name of the format that `text` asks for: in any case, with any separators, or an alias.

    Args:
        text: such as "NVFP4", "fp8-block" or "fp8".
        known: names of formats.

    Returns:
        A name of `known`, or `text` itself if it is none.
    """
    if text in known:
        return text
    plain = _plain(text)
    names = {_plain(name): name for name in known} | {
        alias: name for alias, name in _ALIASES.items() if name in known
    }
    return names.get(plain, text)


def unknown_format(text: str, known: Collection[str]) -> str:
    """Message that no format is called `text`, with the nearest one and all others."""
    similar = [name for name in _SIMILAR.get(_plain(text), ()) if name in known]
    return unknown_name("format", text, known, nearest=similar)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
