"""No quantization: BF16 weights, which every engine that supports the model loads.

Completely dequantized checkpoints are written in it. It claims no checkpoint, because a config.json
without `quantization_config` does not say that a conversion wrote it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class PlainDialect(Dialect):
    """Weights in BF16, and no `quantization_config`."""

    name = "plain"
    summary = "no quantization: every engine that loads the model in BF16"
    encodings = {}  # noqa: RUF012

    def quantization_config(
        self, formats: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, Any]:
        """As Dialect; empty, so that config.json gets none."""
        for module, format in formats.items():
            self._encoding(module, format)
        return {}

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        return False

    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect."""
        return lambda module: None
