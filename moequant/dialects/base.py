"""The base class of dialects: tensor names, encodings and `quantization_config`.

A dialect renames and re-encodes tensors losslessly. Reciprocal scales and offset codes exist only
in dialects.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from moequant.dialects.config_fields import QUANTIZATION_CONFIG, as_mapping
from moequant.dialects.encodings import Plain
from moequant.dialects.names import kept_blocks
from moequant.errors import UnsupportedError
from moequant.formats import get_format

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from moequant.dialects.encodings import Encoding
    from moequant.dialects.input_scale import InputScale
    from moequant.dialects.schemes import Scheme
    from moequant.dialects.tensors import Block
    from moequant.formats import QuantizedWeight, TensorSpec

_PLAIN = Plain()


def no_activations(module: str) -> str | None:
    """`activations_reader` of a config that says nothing of activations."""
    return None


class Dialect:
    """The encodings and the config of one tool or engine.

    A *module* is a tensor name without its `.weight`, for example
    `model.layers.3.mlp.experts.7.down_proj`. All tensor names below are full names.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    schemes: ClassVar[Mapping[str, Scheme]]
    """By name, the quantized formats it knows; some are read-only."""
    methods: ClassVar[tuple[str, ...]] = ()
    """`quant_method` of config.json in this dialect."""
    config_keys: ClassVar[tuple[str, ...]] = ()
    """Fields of `quantization_config` that stand at the top of config.json too."""
    architectures: ClassVar[tuple[str, ...]] = ()
    """Names of the only architectures whose models engines load in it; empty for no such limit."""
    stacks: ClassVar[bool] = False
    """Whether the experts of a layer lie stacked in tensors that the architecture table names.

    Names and shapes below are a single weight's all the same: whoever writes or reads the files
    puts gate and up of an expert together, row by row as the table says, and the experts in order.
    """

    quantizes_all: ClassVar[bool] = False
    """Whether engines take every linear layer for quantized, whatever config.json lists."""

    @cached_property
    def encodings(self) -> Mapping[str, Encoding]:
        """How the parts of each quantized format it knows lie on disk."""
        return {name: scheme.encoding for name, scheme in self.schemes.items()}

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """The quantized formats it can write; every dialect also writes BF16."""
        return tuple(name for name, e in self.encodings.items() if not e.read_only)

    @cached_property
    def telling_suffixes(self) -> frozenset[str]:
        """Suffixes of tensor names that only quantized weights have."""
        every = {suffix for e in self.encodings.values() for suffix in e.suffixes}
        return frozenset(every - {"weight"})

    def encoding(self, format: str) -> Encoding:
        """The encoding of a format that it knows."""
        return _PLAIN if format == _PLAIN.format.name else self.encodings[format]

    def check(
        self, module: str, format: str, shape: Sequence[int], *, rows_follow: bool = False
    ) -> None:
        """Check that engines would load a weight [N, K] correctly.

        Args:
            module: the weight's module.
            format: the weight's format.
            shape: the weight's shape.
            rows_follow: whether engines merge it with a layer whose rows come after its own.

        Raises:
            UnsupportedError: a format or shape that the dialect does not support.
        """
        self._encoding(module, format).check(module, shape, rows_follow=rows_follow)

    def check_static(self, module: str, format: str) -> None:
        """Check that engines read a static scale of the input of a weight in `format`.

        Raises:
            UnsupportedError: the dialect has none for that format.
        """
        # Some are only read: engines quantize the inputs of other formats by them.
        able = [
            name
            for name in self.carried
            if get_format(name).static_activations and self.input_scale(name) is not None
        ]
        if format not in able:
            which = f"only for {', '.join(able)}" if able else "for no format"
            raise UnsupportedError(
                f"{module}: the dialect {self.name} has static scales of activations {which}, and "
                f"not for {format}; choose another dialect, or leave activation_scales out"
            )

    def specs(
        self, module: str, format: str, shape: Sequence[int], *, static: bool = False
    ) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor that `to_disk` returns for a weight [N, K], in order.

        Args:
            module: the weight's module.
            format: the weight's format.
            shape: the weight's shape.
            static: whether its input has a static scale.

        Raises:
            UnsupportedError: as `check` and `check_static`.
        """
        self.check(module, format, shape)
        found = self._encoding(module, format).specs(module, shape)
        if static:
            self.check_static(module, format)
            found |= self.input_scale_specs(module, format)
        return found

    def input_scale(self, format: str) -> InputScale | None:
        """How static scales of the inputs of weights in `format` are stored; None if not at all."""
        scheme = self.schemes.get(format)
        return None if scheme is None else scheme.input_scale

    def input_scale_specs(self, module: str, format: str) -> dict[str, TensorSpec]:
        """Dtype and shape of the tensor with the static scale of a module's input, by name.

        Empty where the dialect has none for the format.
        """
        found = self.input_scale(format)
        return {} if found is None else {found.name_of(module): found.spec}

    def module_of_scale(self, name: str) -> str:
        """The module of the weight to which a calibrated scale of activations belongs, by name."""
        module, _, suffix = name.rpartition(".")
        scales = (scheme.input_scale for scheme in self.schemes.values())
        own = next((s for s in scales if s is not None and s.suffix == suffix and s.leaves), None)
        return module if own is None else own.module_of(module)

    def to_disk(
        self,
        module: str,
        q: QuantizedWeight,
        *,
        consume: bool = False,
        input_scale: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Encode one weight; names, dtypes and shapes are those of `specs`.

        Exact, unless the encoding says otherwise.

        Args:
            module: the weight's module.
            q: the weight.
            consume: whether codes may be changed in place; `q` is invalid afterwards.
            input_scale: [] float32, the static scale of its input, which multiplies; None without.

        Raises:
            UnsupportedError: as `specs`.
        """
        self.check(module, q.format, q.shape)
        found = self._encoding(module, q.format).encode(module, q, consume=consume)
        if input_scale is not None:
            self.check_static(module, q.format)
            scale = self.input_scale(q.format)
            assert scale is not None
            found[scale.name_of(module)] = scale.stored(input_scale)
        return found

    def from_disk(
        self,
        module: str,
        format: str,
        tensors: Mapping[str, Tensor],
        *,
        block: Block | None = None,
    ) -> QuantizedWeight:
        """Inverse of `to_disk`; also accepts variants of other writers, as the encoding says.

        Args:
            module: the weight's module.
            format: the weight's format.
            tensors: by full name; may contain other modules'. On the meta device, they represent
                headers.
            block: what `block_reader` says of the module, if known.

        Raises:
            CheckpointError: a tensor is missing or has the wrong dtype or shape.
            UnsupportedError: a format the dialect does not know, or a scale with values that the
                format's scale dtype cannot represent.
        """
        if format in self.encodings:
            return self.encodings[format].decode(module, tensors, block=block)
        return self._encoding(module, format).decode(module, tensors)

    def as_read(self, q: QuantizedWeight) -> QuantizedWeight:
        """The weight that `from_disk` returns for what `to_disk` writes for `q`."""
        return self.encoding(q.format).as_read(q)

    def stored_ratio(self, q: QuantizedWeight) -> float:
        """The exact numbers on disk divided by those that `from_disk` returns; 1 if exact."""
        return self.encoding(q.format).stored_ratio(q)

    def _encoding(self, module: str, format: str) -> Encoding:
        """The encoding to write a format in."""
        if format not in (*self.carried, _PLAIN.format.name):
            carried = ", ".join((*self.carried, _PLAIN.format.name))
            raise UnsupportedError(
                f"{module}: the dialect {self.name} does not support {format}, only {carried}; "
                "choose another dialect or format"
            )
        return self.encoding(format)

    def quantization_config(
        self,
        formats: Mapping[str, str],
        kept: Iterable[str],
        static: Collection[str] = frozenset(),
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json; it does not depend on options of formats.

        Args:
            formats: format by converted module.
            kept: every other module with a two-dimensional weight; for stacked experts, the module
                of the stack, `model.layers.3.mlp.experts`.
            static: the converted modules whose input has a static scale.

        Raises:
            UnsupportedError: the dialect does not support this mixture of formats.
        """
        for module, format in formats.items():
            self._encoding(module, format)
            if module in static:
                self.check_static(module, format)
        return self._config(formats, *kept_blocks(kept), static)

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        """As `quantization_config`, for what `kept_blocks` says of the kept modules."""
        return {}

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
            read: reads a JSON file next to config.json by name; None if it does not exist.

        Raises:
            CheckpointError: that file is malformed.
        """
        return quantization_config

    def describes(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` has the `quant_method` of this dialect."""
        return quantization_config.get("quant_method") in self.methods

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether this `quantization_config` is of this dialect."""
        return self.describes(quantization_config)

    def reader(
        self, quantization_config: Mapping[str, Any], *, weights_only: bool = False
    ) -> Callable[[str], str | None]:
        """Parse the config once, to look up any number of modules.

        config.json describes linear layers and may not mention embeddings, norms and routers. So
        look up only modules that are known to be linear or have codes on disk.

        Args:
            quantization_config: of config.json, completed.
            weights_only: for sources, of which only weights are read: ignores how activations are
                quantized, and also knows read-only formats.

        Returns:
            A function from a module's name to its format by config.json, or None if the module is
            not quantized. The function raises UnsupportedError for an unsupported scheme.

        Raises:
            CheckpointError: a field has the wrong type.
        """
        return self._reader(as_mapping(quantization_config, QUANTIZATION_CONFIG), weights_only)

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        """As `reader`."""
        return lambda module: None

    def block_reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], Block | None]:
        """Parse the config once, to look up the rows and columns that share a scale.

        Args:
            quantization_config: of config.json, completed.

        Returns:
            A function from the name of a module that `reader` gives a format to rows and columns,
            WHOLE for all of them; None where the config says no more than the format. The function
            raises CheckpointError for a field of the wrong type.
        """
        return self._block_reader(as_mapping(quantization_config, QUANTIZATION_CONFIG))

    def _block_reader(self, config: Mapping[str, Any]) -> Callable[[str], Block | None]:
        """As `block_reader`."""
        return lambda module: None

    def activations_reader(
        self, quantization_config: Mapping[str, Any]
    ) -> Callable[[str], str | None]:
        """Parse the config once, to look up schemes of activations that formats do not imply.

        Args:
            quantization_config: of config.json, completed.

        Returns:
            A function from a module's name to "nvfp4_static", "fp8_static" or "mxfp4", where the
            config says that its input is quantized so; else None, and `reader` says whether it is
            supported.

        Raises:
            CheckpointError: a field has the wrong type.
        """
        return self._activations_reader(as_mapping(quantization_config, QUANTIZATION_CONFIG))

    def _activations_reader(self, config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As `activations_reader`."""
        return no_activations


class Unquantized(Dialect):
    """What an output is in whose weights are all BF16: no `quantization_config`.

    Not in the registry, because it is no tool's dialect and a source in it has none.
    """

    name = "plain"
    schemes = {}  # noqa: RUF012


UNQUANTIZED = Unquantized()
