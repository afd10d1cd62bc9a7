"""Recipes: which weights get which format, read from TOML with a strict schema."""

from __future__ import annotations

import re
import sys
from functools import cached_property
from importlib import resources
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from moequant.conversion.rounding import split_options
from moequant.dialects import get_dialect
from moequant.dialects.regexes import compile_regex
from moequant.errors import (
    MoequantError,
    RecipeError,
    StatisticsError,
    UnsupportedError,
    unknown_name,
)
from moequant.formats import (
    CONVERTIBLE,
    WRITABLE,
    check_static_scale,
    format_name,
    get_format,
    unknown_format,
)
from moequant.storage.given_path import path_text
from moequant.storage.schema_errors import field_path
from moequant.storage.toml_files import parse_toml, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from moequant.conversion.rounding import GptqRounding
    from moequant.models import TensorRole

_WITH_STATIC_SCALES = [n for n, f in CONVERTIBLE.items() if f.static_activations is not None]

KEEP = "keep"
"""In place of a format: copy these tensors unchanged, whatever later rules say."""

_FORMATS = (*WRITABLE, KEEP)

FROM_STATISTICS, FROM_FILE = "statistics", "file"
"""Where static scales of activations come from, if not from a number."""

# More digits could overflow a float.
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])B?|B)", re.IGNORECASE)
_UNITS = {None: 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "5G" or "500MB"; decimal units, as on the hub.

    Raises:
        ValueError: not a size, without a unit, or zero.
    """
    match = _SIZE.fullmatch(text.strip())
    # A unit is required, because nobody means 5 bytes.
    size_bytes = int(float(match[1]) * _UNITS[match[2] and match[2].upper()]) if match else 0
    if size_bytes < 1:
        raise ValueError(
            f"{show(text)} is not a size; give a number above zero and a unit (B, KB, MB, GB or "
            "TB), such as 500MB or 5GB"
        )
    return size_bytes


def _accepted_by(check: Callable[[str], object]) -> AfterValidator:
    """A validator that calls `check`; pydantic reports its error."""

    def validate(text: str) -> str:
        try:
            check(text)
        except MoequantError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(validate)


def _layer_slice(text: str) -> str:
    if not re.fullmatch(r"(-?[0-9]{1,6})?:(-?[0-9]{1,6})?|-?[0-9]{1,6}", text):
        raise ValueError(f'{show(text)} is not a layer or a slice such as "3:" or ":-1"')
    return text


def _integer(value: object) -> object:
    if type(value) is not int:
        raise ValueError(f"{show(value)} is not a number")
    return value


def parse_activation_scales(value: object) -> str | float:
    """Where static scales of activations come from: FROM_STATISTICS, FROM_FILE, or a number.

    Raises:
        ValueError: none of these, or a number that no static scale may be.
    """
    if isinstance(value, str) and value in (FROM_STATISTICS, FROM_FILE):
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(
            f'{show(value)} is neither a number nor "{FROM_STATISTICS}" nor "{FROM_FILE}"'
        )
    try:
        check_static_scale(float(value), None)
    except (StatisticsError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return float(value)


def _optional_scales(value: object) -> str | float | None:
    return None if value is None else parse_activation_scales(value)


def _format(text: str) -> str:
    return format_name(text, _FORMATS)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Strict):
    """Gives a format to the weights it matches; all conditions given must hold.

    Attributes:
        roles: roles of the architecture table.
        match: regular expression for the whole tensor name.
        layers: a layer or a slice of layers, as in Python.
        format: a writable format, such as "nvfp4" or "bf16", or "keep"; other names of a format,
            such as "NVFP4", become its own.
        options: values of the format's options, and of those in `moequant.conversion.rounding`.
        activation_scales: where static scales of the weights' inputs come from, if they shall
            have any; see `parse_activation_scales`.
    """

    roles: tuple[Literal["routed_experts", "shared_experts", "dense_mlp", "attention"], ...] = ()
    match: Annotated[str, _accepted_by(compile_regex)] | None = None
    layers: Annotated[str, AfterValidator(_layer_slice)] | None = None
    format: Annotated[str, AfterValidator(_format)]
    options: dict[str, str] = {}
    activation_scales: Annotated[str | float | None, BeforeValidator(_optional_scales)] = None

    @model_validator(mode="after")
    def _check(self) -> Rule:
        if not self.roles and self.match is None:
            raise ValueError("a rule needs roles or match")
        if self.format not in _FORMATS:
            raise ValueError(unknown_format(self.format, _FORMATS))
        try:
            if self.format != KEEP and not get_format(self.format).is_plain:
                split_options(self.format, self.options)
            elif self.options:
                given = ", ".join(map(show, self.options))
                raise ValueError(f"options {given}, but {self.format} has none; remove them")
        except MoequantError as error:
            raise ValueError(str(error)) from None
        if self.activation_scales is not None and self.format not in _WITH_STATIC_SCALES:
            raise ValueError(
                f"activation_scales, but engines take them only beside "
                f"{', '.join(_WITH_STATIC_SCALES)}, not {self.format}; remove them"
            )
        return self

    @cached_property
    def resolved_options(self) -> Mapping[str, str]:
        """Every option of the rule's format with its value; not for "keep"."""
        return split_options(self.format, self.options)[0]

    @cached_property
    def rounding(self) -> GptqRounding | None:
        """How GPTQ rounds; None if codes are the nearest. Not for "keep"."""
        return split_options(self.format, self.options)[1]

    def matches(self, name: str, role: TensorRole, layer_count: int) -> bool:
        """Whether the rule matches a tensor of a model with `layer_count` layers."""
        if self.roles and role.role not in self.roles:
            return False
        if self.match is not None and not re.fullmatch(self.match, name):
            return False
        return self.layers is None or role.layer in _layers(self.layers, layer_count)


class OutputSettings(_Strict):
    """How the output is written.

    Attributes:
        dialect: the output's dialect; by default the format's.
        max_shard_size: maximum size of a shard, unless a single tensor is larger.
    """

    dialect: Annotated[str, _accepted_by(get_dialect)] | None = None
    max_shard_size: Annotated[str, _accepted_by(parse_size)] = "5GB"


class Recipe(_Strict):
    """A recipe; the first rule that matches a weight applies, and unmatched weights are kept."""

    schema_version: Annotated[Literal[1], BeforeValidator(_integer)] = 1
    summary: str = ""
    architectures: tuple[str, ...] = ()
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]
    output: OutputSettings = OutputSettings()
    _kept_layers: int = PrivateAttr(0)
    """How many of the first rules are of `keeping`."""

    @classmethod
    def for_format(
        cls,
        format: str,
        options: Mapping[str, str] | None = None,
        activation_scales: str | float | None = None,
    ) -> Recipe:
        """A recipe for the routed experts; for "bf16", one that dequantizes every weight.

        Args:
            format: the format, by any of the names of `format_name`.
            options: as of `Rule`.
            activation_scales: as of `Rule`.

        Raises:
            UnsupportedError: there is no such format.
            RecipeError: it has no such option or value, or no activation scales.
        """
        format = format_name(format, WRITABLE)
        if format not in WRITABLE:
            raise UnsupportedError(unknown_format(format, WRITABLE))
        if options:
            split_options(format, options)  # whose message names the option
        what: dict[str, Any] = {"roles": ("routed_experts",), "options": dict(options or {})}
        summary = f"Routed experts to {format}."
        if WRITABLE[format].is_plain:
            what = {"match": ".*"}
            summary = "Every quantized weight back to BF16."
        try:
            rule = Rule(**what, format=format, activation_scales=activation_scales)
        except ValidationError as error:
            raise RecipeError(_explain(error)) from None
        return cls(summary=summary, rules=(rule,))

    def with_output(self, *, dialect: str | None, max_shard_size: str | None) -> Recipe:
        """This recipe with another dialect or shard size, if given; raises RecipeError."""
        given = {"dialect": dialect, "max_shard_size": max_shard_size}
        changed = {key: value for key, value in given.items() if value is not None}
        try:
            output = OutputSettings.model_validate(self.output.model_dump() | changed)
        except ValidationError as error:
            raise RecipeError(_explain(error)) from None
        return self.model_copy(update={"output": output})

    def keeping(self, layers: Iterable[int]) -> Recipe:
        """This recipe, but the routed experts of these layers are kept."""
        rules = [
            Rule(roles=("routed_experts",), layers=str(layer), format=KEEP)
            for layer in sorted(layers)
        ]
        kept = self.model_copy(update={"rules": (*rules, *self.rules)})
        kept._kept_layers = self._kept_layers + len(rules)
        return kept

    @property
    def given_rules(self) -> tuple[Rule, ...]:
        """The rules without those of `keeping`."""
        return self.rules[self._kept_layers :]

    def rule_for(self, name: str, role: TensorRole, layer_count: int) -> Rule | None:
        """The first rule that matches, or None."""
        return next((rule for rule in self.rules if rule.matches(name, role, layer_count)), None)


def _layers(text: str, layer_count: int) -> range:
    if ":" not in text:
        index = int(text) + (layer_count if int(text) < 0 else 0)
        return range(index, index + 1)
    start, stop = (int(part) if part else None for part in text.split(":"))
    if stop is not None:
        return range(layer_count)[start:stop]
    # An open end includes the multi-token-prediction layers, which follow the last layer.
    first = start or 0
    return range(max(first + layer_count, 0) if first < 0 else first, sys.maxsize)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with moequant."""
    files = resources.files("moequant.recipes").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load_recipe(name_or_file: str | Path) -> Recipe:
    """A recipe shipped with moequant, or one from a TOML file.

    Raises:
        RecipeError: no such recipe, not TOML, or against the schema; names the key.
        UnsupportedError: neither a text nor a path.
    """
    given = path_text("recipe", name_or_file, "the name of a recipe or the path of a TOML file")
    if given in shipped_recipes():
        source = resources.files("moequant.recipes").joinpath(f"{given}.toml")
        text = source.read_text("utf-8")
    elif not given:  # pathlib takes it for the current folder
        raise RecipeError(unknown_name("recipe", "", shipped_recipes()))
    else:
        text = _read_file(Path(given))
    try:
        return Recipe.model_validate(parse_toml(text))
    except ValidationError as error:
        raise RecipeError(f"{name_or_file}: {_explain(error)}") from None
    except ValueError as error:
        raise RecipeError(f"{name_or_file}: {error}") from None


def _read_file(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        unknown = unknown_name("recipe", str(path), shipped_recipes())
        raise RecipeError(f"{path}: no such file, and {unknown}") from None
    except ValueError as error:
        raise RecipeError(
            f"{path}: {error}; a recipe is a TOML file, or the name of one of `moequant recipes`"
        ) from None


def _explain(error: ValidationError) -> str:
    entries = error.errors(include_url=False)
    # For an invalid rule, pydantic also reports that there are no rules.
    wrong_rule = any(entry["loc"][:1] == ("rules",) and len(entry["loc"]) > 1 for entry in entries)
    problems = [
        f"{field_path(entry['loc']) or 'the recipe'}: {_reason(entry)}"
        for entry in entries
        if not (wrong_rule and entry["loc"] == ("rules",))
    ]
    return "; ".join(problems)


def _reason(entry: Mapping[str, object]) -> str:
    message = str(entry["msg"])
    match entry["type"]:
        case "extra_forbidden":
            return "unknown key; remove it, or correct its name"
        case "missing" if entry["loc"] == ("rules",):
            return "missing; add a [[rules]] with roles or match, and a format"
        case "missing":
            return "missing; add it"
        case "value_error":  # our own messages, which include the value found
            return message.removeprefix("Value error, ")
    return f"{message}, but found {show(entry['input'])}"
