"""No quantization at all: what `bf16` makes, for engines that load the model in BF16.

It is no dialect of the registry: nobody asks for it, and no checkpoint is recognised by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Plain(Dialect):
    """Weights as they are, and no `quantization_config`."""

    name = "plain"
    summary = "no quantization: every engine that loads the model in BF16"
    encodings = {}  # noqa: RUF012

    def quantization_config(
        self, formats: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, Any]:
        """As Dialect; empty, which stands for none."""
        assert not formats, formats
        return {}

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        return False

    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect."""
        return lambda module: None
