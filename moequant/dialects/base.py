"""What a consumer calls the tensors of a quantized module, and what it wants in config.json.

A dialect renames and re-encodes losslessly: bytes in, the same numbers out. Reciprocal scales and
offset codes exist here and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format, QuantizedWeight, TensorSpec


class Dialect(ABC):
    """Names, dtypes, shapes and config of one consumer: one file, and one line in REGISTRY.

    A *module* is a tensor name without its `.weight`, for example
    `model.layers.3.mlp.experts.7.down_proj`. All tensor names below are full names.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    suffixes: ClassVar[Mapping[str, tuple[str, ...]]]
    """For each format it can carry: the names after `module.` that it writes, the codes first."""

    @abstractmethod
    def check(self, module: str, format: Format, shape: Sequence[int]) -> None:
        """Refuse a weight [N, K] that the consumers of this dialect would load wrong.

        Raises:
            UnsupportedError: a format the dialect cannot carry, or such a shape; names the module.
        """

    @abstractmethod
    def specs(self, module: str, format: Format, shape: Sequence[int]) -> dict[str, TensorSpec]:
        """What `to_disk` writes for a weight [N, K], in the order of `suffixes`."""

    @abstractmethod
    def to_disk(self, module: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of one weight as they go to disk; equal to `specs` in names and shapes."""

    @abstractmethod
    def from_disk(self, module: str, format: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Inverse of `to_disk`. `tensors` may hold more than this module's.

        Raises:
            CheckpointError: a tensor is missing or has the wrong dtype or shape; names it.
        """

    @abstractmethod
    def quantization_config(
        self,
        formats: Mapping[str, str],
        kept: Iterable[str],
        options: Mapping[str, Mapping[str, str]],
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            formats: format by converted module.
            kept: every other module with a two-dimensional weight.
            options: resolved options by format.

        Raises:
            UnsupportedError: the dialect cannot carry this mixture of formats.
        """

    @abstractmethod
    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this `quantization_config` is written in this dialect."""

    @abstractmethod
    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """Parse the config once; the function returned is `format_of` for any number of modules.

        config.json speaks of linear layers. Embeddings, norms and routers it may pass over in
        silence, so ask about a module whose codes are on disk, or one known to be linear.

        Raises:
            CheckpointError: a field has the wrong type; names it.
        """

    def format_of(self, module: str, quantization_config: Mapping[str, Any]) -> str | None:
        """The format config.json gives `module`, or None where it is kept as it was.

        Raises:
            CheckpointError: a field has the wrong type; names it.
            UnsupportedError: a scheme of this dialect that we have no format for; names the field.
        """
        return self.reader(quantization_config)(module)

    def warnings(self, format: str, kept: Iterable[str]) -> list[str]:
        """What known engines get wrong with `format` in this dialect, a sentence each.

        Args:
            format: name of a format.
            kept: the modules that stay as they are.
        """
        return []
