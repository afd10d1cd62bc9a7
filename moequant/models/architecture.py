"""One architecture: maps tensor names to roles and back, and reads sizes from config.json.

An architecture is built from an entry of architectures.toml, whose head explains the schema, or
from an entry of a user's file. `moequant.models.table` reads both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.act_fn import ActFn
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models.config_values import check_dtype_and_rope
from moequant.models.moe_config import PROJECTIONS, MoeConfig
from moequant.models.stacked import BIAS, StackedExperts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROUTED_EXPERTS = "routed_experts"
SHARED_EXPERTS = "shared_experts"
EXPERT_BIAS = "expert_bias"
OTHER = "other"
CONVERTIBLE_ROLES = (ROUTED_EXPERTS, SHARED_EXPERTS, "dense_mlp", "attention")
"""Roles whose two-dimensional weights a recipe may quantize. Routers are never quantized."""

# Keys of config.json that an architecture uses unless it names its own.
_COMMON_KEYS = {
    "hidden": ["hidden_size"],
    "layers": ["num_hidden_layers"],
    "activation": ["hidden_act"],
}
# Real configs stay far below these limits; a larger value means a damaged or hostile file.
_MAX_SIZE = 1_000_000
_MAX_NAME_LENGTH = 250
# As engines write them: ASCII digits, no leading zeros, less than _MAX_SIZE.
_NUMBER = "0|[1-9][0-9]{0,5}"
_FIELDS = {"{layer}": f"(?P<layer>{_NUMBER})", "{expert}": f"(?P<expert>{_NUMBER})"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRole:
    """The role of a tensor, and its layer, expert and projection where it has them.

    `projection` is gate, up or down. A tensor that stacks all experts of a layer has no `expert`,
    and its `projection` may also be gate_up.
    """

    role: str
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNorm:
    """A norm that divides by the root mean square, or standard deviation, and multiplies.

    Attributes:
        name: pattern of its weight, in which {layer} is the layer.
        offset: what it adds to its weight.
    """

    name: str
    offset: float = 0.0

    def tensor(self, layer: int) -> str:
        """The name of its weight in a layer."""
        return self.name.format(layer=layer)


class Architecture:
    """One family of checkpoints: its tensor names, and the config keys that hold its sizes.

    Args:
        table: an entry of the architecture table.
        common: name patterns by role that all entries share.
        fused: fused sets, each given by the last name components of its linear layers.
        act_fns: names of functions that are other words for those the runtime computes.
        origin: name of the user's file or record for error messages; None for our own table.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        common: Mapping[str, list[str]],
        *,
        fused: Iterable[Iterable[str]] = (),
        act_fns: Mapping[str, str] | None = None,
        origin: str | None = None,
    ) -> None:
        self.name: str = table["name"]
        self.origin = origin
        self.definition: Mapping[str, Any] | None = None if origin is None else dict(table)
        """The entry as moequant.json records it; None if it is from the built-in table."""
        self.model_types: tuple[str, ...] = tuple(table["model_types"])
        self.flat_model_types: tuple[str, ...] = tuple(table.get("flat_model_types", ()))
        """Those whose config.json has no `section`, if the tensors have the names given here."""
        self.projections: dict[str, str] = table["projections"]
        self._experts: str = table["experts"]
        self._keys: dict[str, list[str]] = _COMMON_KEYS | table["config"]
        self._sparse: dict[str, Any] = table.get("sparse", {})
        self._sparse_kinds = _names(self._sparse.get("kind", "sparse"))
        self._section: str | None = table.get("section")
        self._per_layer: tuple[str, ...] = tuple(table.get("per_layer", ()))
        self._act_fn: dict[str, Any] = table.get("act_fn", {})
        self._act_fns = {**(act_fns or {}), **table.get("act_fns", {})}
        self.gated = "gate" in self.projections
        """Whether experts have a gate projection."""
        pair = [self.projections[p] for p in PROJECTIONS[:2] if p in self.projections]
        self.fused = _disjoint([pair, *table.get("fused", ()), *fused])
        """Fused sets: linear layers that engines merge into one, by last name component."""
        self.routing: str | None = table.get("routing")
        """How its routing differs from what `FusedExperts` computes, in words; None if it does
        not."""
        self.tested: Mapping[str, Mapping[str, str]] = table.get("tested", {})
        """Gaps in the tests, as {gap: {model_type: reason}}: `by_hand` and `not_loaded`; the head
        of architectures.toml explains them."""
        self.stacked = StackedExperts(table["stacked"]) if "stacked" in table else None
        """How a plain checkpoint stacks its experts; None if each expert has its own tensors."""
        self.dialects: tuple[str, ...] | None = table.get("dialects") and tuple(table["dialects"])
        """The only dialects that engines load for this architecture; None if any will do."""
        norm = table.get("expert_norm")
        self.expert_norm = None if norm is None else ExpertNorm(**norm)
        """The norm whose output the experts of a layer multiply; None if it is not described."""
        self._roles = (table.get("roles", {}), common)
        self._projection_of = {leaf: name for name, leaf in self.projections.items()}

    # Compiled on first use: compiling the whole table takes longer than most plans.
    @cached_property
    def _expert_pattern(self) -> re.Pattern[str]:
        leaf_names = "|".join(re.escape(leaf) for leaf in self.projections.values())
        return _compile(self._experts, projection=f"(?P<projection>{leaf_names})")

    @cached_property
    def _stack_patterns(self) -> list[tuple[str, str, re.Pattern[str]]]:
        """Role, stack and name pattern of every tensor that stacks all experts of a layer."""
        if self.stacked is None:
            return []
        suffixes = {ROUTED_EXPERTS: ""} | ({EXPERT_BIAS: BIAS} if self.stacked.biased else {})
        return [
            (role, stack, _compile(pattern + suffix))
            for role, suffix in suffixes.items()
            for stack, pattern in self.stacked.tensors.items()
        ]

    @cached_property
    def _role_patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        return [
            (role, _compile(pattern))
            for roles in self._roles
            for role, patterns in roles.items()
            for pattern in patterns
        ]

    def classify(self, name: str) -> TensorRole:
        """The role of the tensor called `name`.

        Raises:
            UnsupportedError: the name contains "expert" but matches no pattern.
        """
        if match := self._expert_pattern.fullmatch(name):
            return TensorRole(
                role=ROUTED_EXPERTS,
                layer=int(match["layer"]),
                expert=int(match["expert"]),
                projection=self._projection_of[match["projection"]],
            )
        for role, stack, pattern in self._stack_patterns:
            if match := pattern.fullmatch(name):
                return TensorRole(role=role, layer=int(match["layer"]), projection=stack)
        for role, pattern in self._role_patterns:
            if match := pattern.fullmatch(name):
                layer = match.groupdict().get("layer")
                return TensorRole(role=role, layer=None if layer is None else int(layer))
        if "expert" in name.lower():
            stacks = [] if self.stacked is None else self.stacked.tensors.values()
            raise UnsupportedError(
                f"{name}: looks like an expert, but matches no pattern of architecture "
                f"{self.name!r}; experts are expected as {' or '.join([self._experts, *stacks])}; "
                f"{self.how_to_fix('`experts` or `stacked`', 'it is one')}; if it is none, add "
                'roles.NAME = ["PATTERN"] there, and it is copied unchanged'
            )
        return TensorRole(role=OTHER)

    def names_experts(self, names: Iterable[str]) -> bool:
        """Whether some of `names` begin as the names of experts do."""
        return any(name.startswith(self._experts.partition("{")[0]) for name in names)

    def expert_tensor(self, layer: int, expert: int, projection: str) -> str:
        """The name on disk of one expert's weight; `projection` is gate, up or down."""
        leaf = self.projections[projection]
        return self._experts.format(layer=layer, expert=expert, projection=leaf)

    def has_role_pattern(self, name: str) -> bool:
        """Whether a pattern under `roles` matches the name."""
        return any(pattern.fullmatch(name) for _, pattern in self._role_patterns)

    @property
    def names(self) -> tuple[str, ...]:
        """Name patterns of the expert tensors in a plain checkpoint."""
        if self.stacked is not None:
            return tuple(self.stacked.tensors.values())
        leaves = (self.projections[p] for p in PROJECTIONS if p in self.projections)
        return tuple(self._experts.replace("{projection}", leaf) for leaf in leaves)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles with patterns, in order; those common to all architectures come last."""
        return tuple(dict.fromkeys(role for roles in self._roles for role in roles))

    def how_to_fix(self, key: str, cause: str = "the checkpoint is right") -> str:
        """The end of an error message: to change `key` of this description, if `cause` is so."""
        if self.origin is not None:
            return f"if {cause}, change {key} in {self.origin}"
        return (
            f"if {cause}, describe the architecture, with the right {key}, in a file and pass it: "
            "--architecture FILE.toml (docs/architectures.md)"
        )

    def read_config(self, config: Mapping[str, Any]) -> MoeConfig:
        """The sizes of the expert layers.

        Raises:
            CheckpointError: a key is missing or has an invalid value, or see
                `check_dtype_and_rope`.
        """
        check_dtype_and_rope(config)
        config = self._section_of(config)
        experts, top_k = self._positive(config, "experts"), self._positive(config, "top_k")
        if top_k > experts:
            raise CheckpointError(
                f"config.json: {' or '.join(self._keys['top_k'])} is {top_k}, but there are only "
                f"{experts} experts; correct config.json"
            )
        layers = self._layer_count(config)
        mtp_layers = self._positive(config, "mtp_layers", default=0)
        sparse = self._sparse_layers(config, range(layers))
        optional = self._sparse_layers(config, range(layers, layers + mtp_layers))
        act_fn = self._read_act_fn(config)
        return MoeConfig(
            experts=experts,
            top_k=top_k,
            hidden=self._positive(config, "hidden"),
            intermediate=self._positive(config, "intermediate"),
            layers=layers,
            sparse_layers=sparse,
            optional_layers=optional,
            act_fn=act_fn,
            limited=self._read_limited(config, act_fn, (*sparse, *optional)),
        )

    def _section_of(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of config.json that describes the language model."""
        if self._section is None or config.get("model_type") in self.flat_model_types:
            return config
        section = _at(config, self._section)
        if not isinstance(section, dict):
            raise CheckpointError(
                f"config.json: {self._section} is {show(section)}, but architecture {self.name!r} "
                "has its sizes in an object there; correct config.json"
            )
        return section

    def _read_act_fn(self, config: Mapping[str, Any]) -> ActFn:
        name = self._act_fn.get("name") or self._value(config, "activation")
        if name is None:
            name = self._act_fn.get("default")
        if not isinstance(name, str) or len(name) > _MAX_NAME_LENGTH:
            where = self._keys["activation"][0]
            raise self._invalid(where, name, "the name of a function", "config.activation")
        return ActFn(
            name=self._act_fns.get(name, name),
            alpha=self._number(config, "alpha", default=1.0),
            limit=self._number(config, "limit", default=None),
            gated=self.gated,
        )

    def _read_limited(
        self, config: Mapping[str, Any], act_fn: ActFn, layers: Iterable[int]
    ) -> tuple[tuple[int, ActFn], ...]:
        """The functions of those of `layers` for which config.json has a limit.

        Raises:
            CheckpointError: its list of limits ends before the last of them, or holds what is none.
        """
        key = self._act_fn.get("limits")
        if not (limits := _list(config, key)):
            return ()
        limited = []
        for layer in layers:
            if layer >= len(limits):
                raise CheckpointError(
                    f"config.json: {key} has {len(limits)} entries, but layer {layer} holds "
                    "experts; give one entry per layer, null or 0 where there is no limit"
                )
            if limits[layer] in (None, 0) and limits[layer] is not False:
                continue
            limit = self._positive_number(limits[layer], f"{key}[{layer}]", "act_fn.limits")
            limited.append((layer, replace(act_fn, name=self._act_fn["limited"], limit=limit)))
        return tuple(limited)

    def _number(self, config: Mapping[str, Any], quantity: str, default: float | None) -> Any:
        """A number from config.json, else the default in the table, else `default`."""
        value: Any = self._value(config, quantity)
        if value is None:
            return self._act_fn.get(quantity, default)
        return self._positive_number(value, " or ".join(self._keys[quantity]), f"config.{quantity}")

    def _positive_number(self, value: Any, where: str, key: str) -> float:
        # No infinity, which JSON cannot spell but Python reads, and no NaN.
        if type(value) not in (int, float) or not 0 < value < _MAX_SIZE:
            raise self._invalid(where, value, "a positive number", key)
        return float(value)

    def _invalid(self, where: str, value: object, needed: str, key: str) -> CheckpointError:
        """The error for a value of config.json; `key` of the description names its place."""
        return CheckpointError(
            f"config.json: {where} is {show(value)}, but architecture {self.name!r} needs {needed} "
            f"there; {self.how_to_fix(f'`{key}`')}"
        )

    def _sparse_layers(self, config: Mapping[str, Any], layers: range) -> tuple[int, ...]:
        rule = self._sparse
        if kinds := self._kinds(config):
            behind, sparse = len(kinds), self._sparse_kinds
            return tuple(n for n in layers if n >= behind or str(kinds[n]) in sparse)
        # Sets, because a hostile list may have as many entries as there are layers.
        if listed := _layers(config, rule.get("listed")):
            return tuple(layer for layer in layers if layer in listed)

        def number(name: str, default: int, minimum: int = 0) -> int:
            key = rule.get(name, "")
            if (value := config.get(key)) is None:
                return default
            return self._integer(value, key, minimum, f"sparse.{name}")

        first, last = number("first", 0), number("last", -1, minimum=-1)
        step, phase = number("step", 1, minimum=1), number("phase", 0)
        dense = _layers(config, rule.get("except"))
        offset = rule.get("offset", 0) - phase
        return tuple(
            layer
            for layer in layers
            if layer >= first
            and (last < 0 or layer <= last)
            and (layer + offset) % step == 0
            and layer not in dense
        )

    def _kinds(self, config: Mapping[str, Any]) -> Any:
        """The kind of each layer: a list, or a text with one letter per layer; () if not given.

        A text counts only where the kinds of sparse layers are single letters.
        """
        letters = any(len(kind) == 1 for kind in self._sparse_kinds)
        for key in _names(self._sparse.get("kinds")):
            if letters and isinstance(config.get(key), str):
                return config[key]
            if listed := _list(config, key):
                return listed
        return ()

    def _value(self, config: Mapping[str, Any], quantity: str) -> Any:
        for key in self._keys.get(quantity, ()):
            value = _at(config, key)
            if value is not None:
                return _same(key, value) if quantity in self._per_layer else value
        return None

    def _layer_count(self, config: Mapping[str, Any]) -> int:
        """The number of layers: an integer, or the length of a list or of a text of letters."""
        value = self._value(config, "layers")
        # Any other text, such as a number in quotes, is an error.
        is_text = isinstance(value, str) and value == self._kinds(config)
        if (is_text or isinstance(value, list)) and 0 < len(value) <= _MAX_SIZE:
            return len(value)
        return self._positive(config, "layers")

    def _positive(
        self, config: Mapping[str, Any], quantity: str, default: int | None = None
    ) -> int:
        value: Any = self._value(config, quantity)
        if value is None and default is not None:
            return default
        minimum = 1 if default is None else 0
        return self._integer(
            value, " or ".join(self._keys[quantity]), minimum, f"config.{quantity}"
        )

    def _integer(self, value: Any, where: str, minimum: int, key: str) -> int:
        if type(value) is not int or not minimum <= value <= _MAX_SIZE:
            needed = f"an integer from {minimum} to {_MAX_SIZE}"
            raise self._invalid(where, value, needed, key)
        return value


def _compile(pattern: str, **fields: str) -> re.Pattern[str]:
    """A name pattern of the table as a regular expression."""
    named = _FIELDS | {"*": ".+"} | {f"{{{name}}}": text for name, text in fields.items()}

    def translate(part: str) -> str:
        if part in named:
            return named[part]
        if part.startswith("{"):
            return f"(?:{'|'.join(re.escape(choice) for choice in part[1:-1].split('|'))})"
        return re.escape(part)

    return re.compile("".join(map(translate, re.split(r"(\{[^}]*\}|\*)", pattern))))


def _disjoint(sets: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """The sets, each without members of earlier sets; sets of fewer than two names are dropped."""
    taken: set[str] = set()
    kept = []
    for names in sets:
        rest = tuple(name for name in names if name not in taken)
        taken |= set(rest)
        if len(rest) > 1:
            kept.append(rest)
    return tuple(kept)


def _at(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key such as `text_config.hidden_size`; None if it is missing."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _names(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _same(key: str, value: Any) -> Any:
    """The common entry of a list with one entry per layer; any other value unchanged."""
    if not isinstance(value, list) or not value:
        return value
    other = next((entry for entry in value if entry != value[0]), None)
    if other is not None:
        raise CheckpointError(
            f"config.json: {key} is {show(value[0])} in one layer and {show(other)} in another, "
            "but all layers must have the same. Correct config.json if they do; models whose "
            "layers differ are not supported"
        )
    return value[0]


def _layers(config: Mapping[str, Any], key: str | None) -> set[int]:
    """Layer indices, from a list or a comma-separated text; empty if the key is missing."""
    listed = None if key is None else config.get(key)
    if isinstance(listed, str):
        return {int(layer) for layer in listed.split(",") if re.fullmatch(_NUMBER, layer.strip())}
    return {layer for layer in _list(config, key) if isinstance(layer, int)}


def _list(config: Mapping[str, Any], key: str | None) -> list[Any] | tuple[Any, ...]:
    listed = None if key is None else config.get(key)
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple):
        raise CheckpointError(
            f"config.json: {key} is {show(listed)}, but must be a list with an entry for each "
            "layer, or of layers; take the config.json of the model's release"
        )
    return listed
