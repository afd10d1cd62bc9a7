"""moequant's own table of architectures, and users' files in the same schema.

A user's file replaces the table for the conversion it is passed to. The description that was used
is recorded in moequant.json, so that reading the output does not need the file.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from pkgutil import get_data
from reprlib import repr as show
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)

from moequant.errors import ArchitectureError, UnsupportedError
from moequant.models.architecture import EXPERT_BIAS, OTHER, ROUTED_EXPERTS, Architecture
from moequant.storage.toml_files import parse_toml, read_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

FLAG = "--architecture FILE.toml (docs/architectures.md)"
"""The option by which a user describes an architecture, for error messages."""

_OWN_ROLES = (ROUTED_EXPERTS, EXPERT_BIAS, OTHER)
_MAX_STARS = 2
"""Limit per pattern, because backtracking grows with every * and files may be hostile."""


def _named(pattern: str, wanted: tuple[str, ...]) -> str:
    fields = re.findall(r"\{[^{}]*\}", pattern)
    if sorted(fields) != sorted(f"{{{field}}}" for field in wanted) or "*" in pattern:
        listed = " and ".join(f"{{{field}}}" for field in wanted)
        raise ValueError(f"{pattern!r} needs {listed} exactly once each, no other braces and no *")
    return pattern


def _expert_pattern(pattern: str) -> str:
    _named(pattern, ("layer", "expert", "projection"))
    if not pattern.endswith(".weight"):
        raise ValueError(f"{pattern!r} must end in .weight, as linear layers' names do")
    return pattern


def _role_pattern(pattern: str) -> str:
    if not pattern or pattern.count("*") > _MAX_STARS:
        raise ValueError(f"{pattern!r} is empty, or has more than {_MAX_STARS} *")
    if pattern.count("{layer}") > 1 or pattern.count("{expert}") > 1:
        raise ValueError(f"{pattern!r}: {{layer}} and {{expert}} may appear only once")
    rest = re.sub(r"\{(layer|expert|[^{}|]+(\|[^{}|]+)+)\}", "", pattern)
    if "{" in rest or "}" in rest:
        raise ValueError(f"{pattern!r}: braces must contain layer, expert, or names separated by |")
    return pattern


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _role_name(name: str) -> str:
    if name in _OWN_ROLES:
        raise ValueError(f"role {name!r} has no patterns of its own: use `experts` and `stacked`")
    return name


_Number = Annotated[float | int, Field(gt=0, lt=1_000_000)]
_Role = Annotated[str, Field(min_length=1), AfterValidator(_role_name)]
_Name = Annotated[str, Field(min_length=1)]
_Names = Annotated[list[_Name], Field(min_length=1)]
_LayerPattern = Annotated[str, AfterValidator(lambda pattern: _named(pattern, ("layer",)))]


class _Sparse(_Strict):
    first: _Name | None = None
    last: _Name | None = None
    step: _Name | None = None
    phase: _Name | None = None
    dense: Annotated[_Name | None, Field(alias="except")] = None
    kinds: _Name | _Names | None = None
    kind: _Name | _Names | None = None
    listed: _Name | None = None
    offset: int = 0


class _ActFn(_Strict):
    name: _Name | None = None
    default: _Name | None = None
    alpha: _Number | None = None
    limit: _Number | None = None
    limits: _Name | None = None
    limited: _Name | None = None

    @model_validator(mode="after")
    def _check(self) -> _ActFn:
        if (self.limits is None) != (self.limited is None):
            raise ValueError("give both limits and limited, or neither")
        return self


class _Stacked(_Strict):
    gate_up: _LayerPattern | None = None
    gate: _LayerPattern | None = None
    up: _LayerPattern | None = None
    down: _LayerPattern
    transposed: StrictBool | list[Literal["gate_up", "gate", "up", "down"]] | None = None
    interleaved: StrictBool | None = None
    biased: StrictBool = False
    flat: StrictBool = False

    @model_validator(mode="after")
    def _check(self) -> _Stacked:
        if (self.gate_up is None) == (self.up is None):
            raise ValueError("besides down, give either gate_up, or up (and gate)")
        if self.gate_up is not None and self.interleaved is None:
            raise ValueError(
                "gate_up needs interleaved = true if the rows of gate and up alternate, or false "
                "if all gate rows come first; see the model's forward, the shape does not tell"
            )
        transposed = self.transposed if isinstance(self.transposed, list) else []
        if unknown := [stack for stack in transposed if getattr(self, stack) is None]:
            raise ValueError(f"transposed names {unknown[0]}, but no such stack is given")
        if self.flat and self.biased:
            raise ValueError("flat and biased together are not supported")
        return self


class _ExpertNorm(_Strict):
    name: _LayerPattern
    offset: Literal[0, 1] = 0


class _Tested(_Strict):
    by_hand: dict[str, _Name] = {}
    not_loaded: dict[str, _Name] = {}


class _Entry(_Strict):
    name: _Name
    model_types: _Names
    flat_model_types: _Names | None = None
    experts: Annotated[str, AfterValidator(_expert_pattern)]
    projections: dict[Literal["gate", "up", "down"], _Name]
    config: dict[
        Literal[
            "experts", "top_k", "intermediate", "hidden", "layers", "activation", "alpha", "limit",
            "mtp_layers",
        ],
        _Names,
    ]  # fmt: skip
    section: _Name | None = None
    per_layer: list[Literal["experts", "top_k", "intermediate"]] = []
    sparse: _Sparse = _Sparse()
    routing: _Name | None = None
    act_fn: _ActFn = _ActFn()
    act_fns: dict[str, _Name] = {}
    stacked: _Stacked | None = None
    expert_norm: _ExpertNorm | None = None
    dialects: _Names | None = None
    roles: dict[_Role, list[Annotated[str, AfterValidator(_role_pattern)]]] = {}
    fused: list[_Names] = []
    tested: _Tested = _Tested()

    @model_validator(mode="after")
    def _check(self) -> _Entry:
        if not {"up", "down"} <= self.projections.keys():
            raise ValueError("projections needs up and down, and gate if experts are gated")
        if len(set(self.projections.values())) != len(self.projections):
            raise ValueError("projections gives two projections the same name")
        missing = {"experts", "top_k", "intermediate"} - self.config.keys()
        if missing:
            raise ValueError(f"config has no {', '.join(sorted(missing))}")
        if self.stacked is not None:
            # A dialect that stacks experts needs their orientation before it sees a tensor.
            if self.dialects is not None and self.stacked.transposed is None:
                raise ValueError("with dialects, stacked needs transposed = true or false")
            stacks_gate = self.stacked.gate_up is not None or self.stacked.gate is not None
            if stacks_gate != ("gate" in self.projections):
                raise ValueError("only one of stacked and projections has a gate")
        return self


class _File(_Strict):
    architecture: Annotated[list[_Entry], Field(min_length=1)]
    fused: list[_Names] = []
    act_fns: dict[str, _Name] = {}
    common: dict[_Role, list[Annotated[str, AfterValidator(_role_pattern)]]] = {}


def read_architectures(file: str | Path) -> tuple[Architecture, ...]:
    """The architectures of a user's file, in the schema of architectures.toml.

    Raises:
        ArchitectureError: `file` is no path, or the file is unreadable, not TOML, or against the
            schema; names the key.
    """
    try:
        path = Path(file)
    except TypeError:
        raise ArchitectureError(
            f"architecture is {show(file)}, but must be the path of a TOML file, as a str or Path: "
            "docs/architectures.md"
        ) from None
    try:
        text = read_text(path)
    except (FileNotFoundError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArchitectureError(
            f"{path}: {reason}; describe the architecture in a TOML file: docs/architectures.md"
        ) from None
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise ArchitectureError(f"{path}: {error}") from None
    return _architectures_of(document, str(path))


def recorded_architectures(definition: object | None, origin: str) -> tuple[Architecture, ...]:
    """The architecture recorded in a moequant.json, called `origin` in errors; none for None.

    Raises:
        ArchitectureError: the record is against the schema; names the key.
    """
    return () if definition is None else _architectures_of({"architecture": [definition]}, origin)


def find_architecture(
    config: Mapping[str, Any], own: Sequence[Architecture] = (), *, names: Collection[str] = ()
) -> Architecture:
    """The architecture of a checkpoint with this config.json.

    Args:
        config: the parsed config.json.
        own: architectures from a user's file or a record, used instead of the table.
        names: names of its tensors, which decide between several architectures of one model_type.

    Raises:
        UnsupportedError: `model_type` is missing or not described.
    """
    model_type = config.get("model_type")
    candidates = own or [*_candidates(model_type)]
    usual = [a for a in candidates if model_type in a.model_types]
    flat = [a for a in candidates if model_type in a.flat_model_types]
    if flat:
        fitting = [a for a in (*usual, *flat) if a.names_experts(names)]
        if len(fitting) == 1:
            return fitting[0]
    if usual:
        return usual[0]
    if model_type is None:
        raise UnsupportedError(
            "config.json: has no model_type, which names the architecture; take the config.json of "
            "the model's release"
        )
    if not isinstance(model_type, str):
        raise UnsupportedError(
            f"config.json: model_type is {show(model_type)}, but must be the name of an "
            "architecture; take the config.json of the model's release"
        )
    where = f"config.json: model_type {show(model_type)} is not in"
    if own:
        known = ", ".join(sorted(t for a in own for t in a.model_types))
        raise UnsupportedError(
            f"{where} {own[0].origin}, which describes {known}; add it to model_types there, or "
            "add an [[architecture]]"
        )
    if names and not any("expert" in name.lower() for name in names):
        raise UnsupportedError(
            f"config.json: model_type {show(model_type)}, and no tensor has 'expert' in its name: "
            "this is a dense model, and moequant converts mixture-of-experts models only; if it "
            f"has experts by other names, describe it: {FLAG}"
        )
    raise UnsupportedError(
        f"{where} the architecture table, which `moequant formats --architectures` prints. "
        f"Describe the architecture in a file and pass it: {FLAG}"
    )


@cache
def architectures() -> tuple[Architecture, ...]:
    """Every architecture of the table."""
    return tuple(_entry(text) for text in _texts()[1:])


def _candidates(model_type: object) -> Iterable[Architecture]:
    """Entries whose text contains the model_type; parsing all entries takes ten times longer."""
    return (_entry(text) for text in _texts()[1:] if f'"{model_type}"' in text)


@cache
def _entry(text: str) -> Architecture:
    (entry,) = tomllib.loads(f"[[architecture]]\n{text}")["architecture"]
    return _architecture(entry, None)


def _architecture(entry: Mapping[str, Any], origin: str | None) -> Architecture:
    head = _head()
    return Architecture(
        entry, head["common"], fused=head["fused"], act_fns=head["act_fns"], origin=origin
    )


@cache
def _head() -> dict[str, Any]:
    return tomllib.loads(_texts()[0])


@cache
def _texts() -> list[str]:
    """The text of the table, split into its head and the entries under [[architecture]]."""
    data = get_data(__name__, "architectures.toml")
    assert data is not None
    return data.decode().split("\n[[architecture]]\n")


def _architectures_of(document: Mapping[str, Any], origin: str) -> tuple[Architecture, ...]:
    """The architectures of a document in our schema, each with the document's head merged in."""
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        raise ArchitectureError(f"{origin}: {_explain(error)}; see docs/architectures.md") from None
    entries = [
        e.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
        for e in file.architecture
    ]
    claimed = Counter(model_type for entry in entries for model_type in entry["model_types"])
    if twice := [model_type for model_type, times in claimed.items() if times > 1]:
        raise ArchitectureError(f"{origin}: model_type {min(twice)!r} is described twice")
    return tuple(_architecture(_whole(entry, file), origin) for entry in entries)


def _whole(entry: dict[str, Any], file: _File) -> dict[str, Any]:
    """An entry with the settings at the head of its file merged in."""
    roles = {role: list(patterns) for role, patterns in entry.get("roles", {}).items()}
    for role, patterns in file.common.items():
        roles.setdefault(role, []).extend(patterns)
    head = {
        "roles": roles,
        "fused": [*entry.get("fused", ()), *file.fused],
        "act_fns": {**file.act_fns, **entry.get("act_fns", {})},
    }
    return {**entry, **{key: value for key, value in head.items() if value}}


def _explain(error: ValidationError) -> str:
    return "; ".join(
        f"{_place(entry['loc'])}: "
        + (
            "unknown key"
            if entry["type"] == "extra_forbidden"
            else entry["msg"].removeprefix("Value error, ")
        )
        for entry in error.errors(include_url=False)[:3]
    )


def _place(location: Iterable[int | str]) -> str:
    """The dotted key of an error's location; list entries are counted from one."""
    text = ""
    for part in location:
        text += f" {part + 1}" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".") or "the file"
