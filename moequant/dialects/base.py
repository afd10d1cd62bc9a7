"""What a consumer calls the tensors of a quantized module, and what it wants in config.json.

A dialect renames and re-encodes losslessly: bytes in, the same numbers out. Reciprocal scales and
offset codes exist here and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from moequant.dialects.encodings import Plain
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from moequant.dialects.encodings import Encoding
    from moequant.formats import QuantizedWeight, TensorSpec

_PLAIN = Plain()


class Dialect(ABC):
    """A table of encodings and a config: one file for each consumer, and one line in REGISTRY.

    A *module* is a tensor name without its `.weight`, for example
    `model.layers.3.mlp.experts.7.down_proj`. All tensor names below are full names.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    encodings: ClassVar[Mapping[str, Encoding]]
    """How the parts of each quantized format it knows lie on disk; some are read-only."""
    config_keys: ClassVar[tuple[str, ...]] = ()
    """Keys at the top of config.json that speak of its quantization too."""
    stacks: ClassVar[bool] = False
    """Whether the experts of a layer lie stacked in tensors that the architecture table names.

    Names and shapes below are a single weight's all the same: whoever writes or reads the files
    puts gate and up of an expert together, row by row as the table says, and the experts in order.
    """

    @property
    def carried(self) -> tuple[str, ...]:
        """The quantized formats it can write; BF16 lies in every dialect as in none."""
        return tuple(name for name, e in self.encodings.items() if not e.read_only)

    def encoding(self, format: str) -> Encoding:
        """How the parts of a format that it knows lie on disk."""
        return _PLAIN if format == _PLAIN.format.name else self.encodings[format]

    def check(
        self, module: str, format: str, shape: Sequence[int], *, rows_follow: bool = False
    ) -> None:
        """Refuse a weight [N, K] that the consumers of this dialect would load wrong.

        Args:
            module: the weight's.
            format: of the weight.
            shape: its shape.
            rows_follow: whether engines merge it with a layer whose rows come after its own.

        Raises:
            UnsupportedError: a format the dialect cannot carry, or such a shape; names the module.
        """
        self._encoding(module, format).check(module, shape, rows_follow=rows_follow)

    def specs(self, module: str, format: str, shape: Sequence[int]) -> dict[str, TensorSpec]:
        """What `to_disk` writes for a weight [N, K], in the order of its encoding's suffixes.

        Raises:
            UnsupportedError: as `check`.
        """
        self.check(module, format, shape)
        return self._encoding(module, format).specs(module, shape)

    def to_disk(
        self, module: str, q: QuantizedWeight, *, consume: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of one weight as they go to disk; equal to `specs` in names and shapes.

        Exact, unless the encoding says otherwise.

        Args:
            module: the weight's.
            q: the weight.
            consume: whether codes may be changed where they lie; `q` is of no use afterwards.

        Raises:
            UnsupportedError: as `check`.
        """
        self.check(module, q.format, q.shape)
        return self._encoding(module, q.format).encode(module, q, consume=consume)

    def from_disk(self, module: str, format: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Inverse of `to_disk`; also reads what other writers leave, as the encoding says.

        `tensors` may hold more than this module's, and headers on the meta device.

        Raises:
            CheckpointError: a tensor is missing or has the wrong dtype or shape; names it.
            UnsupportedError: a format the dialect does not know, or a scale with values that the
                format's scale dtype cannot hold.
        """
        if format in self.encodings:
            return self.encodings[format].decode(module, tensors)
        return self._encoding(module, format).decode(module, tensors)

    def as_read(self, q: QuantizedWeight) -> QuantizedWeight:
        """What `from_disk` makes of `q` once `to_disk` has written it."""
        return self.encoding(q.format).as_read(q)

    def stored_ratio(self, q: QuantizedWeight) -> float:
        """The numbers on disk over those of `q` as it is read: 1 where no reciprocal rounds."""
        return self.encoding(q.format).stored_ratio(q)

    def _encoding(self, module: str, format: str) -> Encoding:
        """The encoding that a format is written in."""
        if format not in (*self.carried, _PLAIN.format.name):
            carried = ", ".join((*self.carried, _PLAIN.format.name))
            raise UnsupportedError(
                f"{module}: the dialect {self.name} does not carry {format}, only {carried}; "
                "choose another dialect or format"
            )
        return self.encoding(format)

    @abstractmethod
    def quantization_config(
        self, formats: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json; options of formats leave no trace in it.

        Args:
            formats: format by converted module.
            kept: every other module with a two-dimensional weight; of experts that are stacked,
                the module that holds them all, `model.layers.3.mlp.experts`.

        Raises:
            UnsupportedError: the dialect cannot carry this mixture of formats.
        """

    def complete(
        self,
        quantization_config: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        read: Callable[[str], Mapping[str, Any] | None],
    ) -> Mapping[str, Any] | None:
        """A source's `quantization_config` with what its writers say of it elsewhere.

        Args:
            quantization_config: the entry of config.json; None where there is none.
            config: config.json.
            read: a JSON file beside config.json, by name; None where it is not there.

        Raises:
            CheckpointError: that file is malformed.
        """
        return quantization_config

    @abstractmethod
    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this `quantization_config` is written in this dialect."""

    @abstractmethod
    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """Parse the config once, and look up any number of modules.

        config.json speaks of linear layers. Embeddings, norms and routers it may pass over in
        silence, so ask about a module whose codes are on disk, or one known to be linear.

        Returns:
            From a module's name the format config.json gives it, or None where it is kept as it
            was. Raises UnsupportedError, with the name of the field, for a scheme of this dialect
            that we have no format for.

        Raises:
            CheckpointError: a field has the wrong type; names it.
        """

    def source_reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As `reader`, for whoever wants the numbers of weights alone.

        What engines do with activations makes no difference then, and read-only formats are known.
        """
        return self.reader(quantization_config)


class SourceDialect(Dialect):
    """One that is read and never written, whatever its encodings could do."""

    @property
    def carried(self) -> tuple[str, ...]:
        """None."""
        return ()

    def quantization_config(
        self, formats: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, Any]:
        """As Dialect; it carries nothing.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"the dialect {self.name} is read and not written; choose another")
