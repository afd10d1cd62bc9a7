"""moequant's own dialect: any format, in any layers, for any architecture.

It is for checkpoints that no engine loads in any dialect, such as gpt-oss in FP8. With an unknown
`quant_method` an engine raises or warns. With a known one it would ignore names that it does not
know and run with uninitialized experts, as vLLM 0.33 does with gpt-oss.

No tensor is called `weight`: transformers continues with an unknown method, and would load codes
of that name as weights.

config.json lists the modules of each format, as names or as regular expressions after "re:", those
whose input has a static scale, and the kept modules, which take precedence.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.config_fields import mapping_field, names_field
from moequant.dialects.names import ModulePatterns, NamePatterns
from moequant.dialects.schemes import MOEQUANT
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_SCHEMA_VERSION = 1
_STATIC = "static_activations"


class Moequant(Dialect):
    """`quant_method: moequant`; the module's docstring says what it is for."""

    name = "moequant"
    summary = "only moequant's own runtime, for checkpoints that no engine loads"
    methods = ("moequant",)
    schemes = MOEQUANT

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        patterns = ModulePatterns.among((*formats, *blocks, *others))
        computed = {m: _STATIC if m in static else "other" for m in formats}
        return {
            "quant_method": "moequant",
            "schema_version": _SCHEMA_VERSION,
            "targets": patterns.of_formats(formats),
            **({_STATIC: patterns.of_formats(computed)[_STATIC]} if static else {}),
            "ignore": [*others, *map(patterns.of_block, blocks)],
        }

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        version = config.get("schema_version")
        stated_of, static_of = _stated_format(config), self._activations_reader(config)

        def format_of(module: str) -> str | None:
            format = stated_of(module)
            if format is None:
                return None
            if version != _SCHEMA_VERSION:
                raise UnsupportedError(
                    f"{module}: {_WHERE}.schema_version is {show(version)}, but this version of "
                    f"moequant reads {_SCHEMA_VERSION}; update moequant"
                )
            if format not in self.carried:
                raise UnsupportedError(
                    f"{module}: {_WHERE}.targets has {show(format)}, but this version of "
                    f"moequant reads only {', '.join(self.carried)}; update moequant"
                )
            if not weights_only and static_of(module) is not None:
                raise UnsupportedError(
                    f"{module}: {_WHERE}.{_STATIC} says that its input has a static scale; run "
                    "its experts with moequant.load_experts"
                )
            return format

        return format_of

    def _activations_reader(self, config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect: the static scheme of the format, for the modules in `static_activations`."""
        stated_of = _stated_format(config)
        static = NamePatterns(names_field(config, _STATIC, _WHERE), f"{_WHERE}.{_STATIC}")

        def activations_of(module: str) -> str | None:
            format = stated_of(module)
            if format is None or format not in self.carried:
                return None
            if static.first_match(module) is None:
                return None
            return self.encodings[format].format.static_activations

        return activations_of


def _stated_format(config: Mapping[str, Any]) -> Callable[[str], str | None]:
    """A function from a module to what `targets` calls its format; None if it is kept.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    ignored = NamePatterns(names_field(config, "ignore", _WHERE), f"{_WHERE}.ignore")
    targets = mapping_field(config, "targets", _WHERE)
    where = f"{_WHERE}.targets"
    targeted = {
        format: NamePatterns(names_field(targets, format, where), f"{where}.{format}")
        for format in targets
    }

    def stated_of(module: str) -> str | None:
        if ignored.first_match(module) is not None:
            return None
        found = (f for f, names in targeted.items() if names.first_match(module) is not None)
        return next(found, None)

    return stated_of
