"""moequant's own dialect: any format, in any layers, for any architecture.

It is for checkpoints that no engine loads in any dialect, such as gpt-oss in FP8. With an unknown
`quant_method` an engine raises or warns. With a known one it would ignore names that it does not
know and run with uninitialized experts, as vLLM 0.33 does with gpt-oss.

No tensor is called `weight`: transformers continues with an unknown method, and would load codes
of that name as weights.

config.json lists the modules of each format, as names or as regular expressions after "re:", and
the kept modules, which take precedence.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any, ClassVar

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import as_mapping, mapping_field, names_field
from moequant.dialects.encodings import (
    AsInMemory,
    E8m0Groups,
    Encoding,
    Fp8Blocks,
    Int4Packed,
    Nvfp4Packed,
)
from moequant.dialects.names import ModulePatterns, NamePatterns, kept_blocks
from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_WHERE = "quantization_config"
_SCHEMA_VERSION = 1


class Moequant(Dialect):
    """`quant_method: moequant`; the module's docstring says what it is for."""

    name = "moequant"
    summary = "only moequant's own runtime, for checkpoints that no engine loads"
    encodings: ClassVar[Mapping[str, Encoding]] = {
        **{name: AsInMemory(format) for name, format in CONVERTIBLE.items()},
        "fp8_block": Fp8Blocks(codes="weight_fp8", scale="weight_scale", ragged=True),
        "nvfp4": Nvfp4Packed(),
        "mxfp4": E8m0Groups("mxfp4", codes="weight_packed"),
        "mxfp8": E8m0Groups("mxfp8", codes="weight_fp8"),
        "w4a8": Int4Packed(),
    }

    def quantization_config(
        self, formats: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, Any]:
        """As Dialect."""
        for module, format in formats.items():
            self._encoding(module, format)
        blocks, others = kept_blocks(kept)
        patterns = ModulePatterns.among((*formats, *blocks, *others))
        return {
            "quant_method": "moequant",
            "schema_version": _SCHEMA_VERSION,
            "targets": patterns.of_formats(formats),
            "ignore": [*others, *map(patterns.of_block, blocks)],
        }

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        return quantization_config.get("quant_method") == "moequant"

    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect."""
        config = as_mapping(quantization_config, _WHERE)
        version = config.get("schema_version")
        ignored = NamePatterns(names_field(config, "ignore", _WHERE), f"{_WHERE}.ignore")
        targets = mapping_field(config, "targets", _WHERE)
        where = f"{_WHERE}.targets"
        targeted = {
            format: NamePatterns(names_field(targets, format, where), f"{where}.{format}")
            for format in targets
        }

        def format_of(module: str) -> str | None:
            if ignored.first_match(module) is not None:
                return None
            found = (f for f, names in targeted.items() if names.first_match(module) is not None)
            format = next(found, None)
            if format is None:
                return None
            if version != _SCHEMA_VERSION:
                raise UnsupportedError(
                    f"{module}: {_WHERE}.schema_version is {show(version)}, but this version of "
                    f"moequant reads {_SCHEMA_VERSION}; update moequant"
                )
            if format not in self.carried:
                raise UnsupportedError(
                    f"{module}: {where} has {show(format)}, but this version of moequant reads "
                    f"only {', '.join(self.carried)}; update moequant"
                )
            return format

        return format_of
