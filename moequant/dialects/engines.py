"""Whether engines load a converted checkpoint, by the rules in engines.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pkgutil import get_data
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Known = Literal["tested", "read", "seen"]

_W4A8_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class Written:
    """The properties of a checkpoint that rules depend on.

    Attributes:
        dialect: name of its dialect.
        model_type: `model_type` in config.json.
        formats: formats of quantized modules other than routed experts.
        experts: formats of the routed experts, in layer order.
        shapes: [N, K] of quantized routed experts.
        ragged: whether the rows of a linear layer do not fill the blocks of its format.
        dtype: dtype in config.json, in which engines compute; None if it has none.
        some_kept: whether the experts of some layers are kept and others converted.
        not_loaded: why transformers does not load this model from compressed-tensors; None if it
            does.
        static: whether the inputs of some routed experts have static scales.
        described: whether a user's file or a record describes the model, so that it is unknown
            which engines support it.
    """

    dialect: str
    model_type: str
    formats: frozenset[str]
    experts: tuple[str, ...]
    shapes: frozenset[tuple[int, ...]]
    some_kept: bool
    ragged: bool = False
    dtype: str | None = None
    not_loaded: str | None = None
    static: bool = False
    described: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether an engine loads a checkpoint with the right weights.

    Attributes:
        engine: the engine's name.
        version: the version that was tested or read.
        loads: None if unknown.
        known: how it is known; None if unknown.
        why: sentences about what fails; empty if it loads.
        cautions: sentences about differences other than the weights.
    """

    engine: str
    version: str
    loads: bool | None
    known: Known | None
    why: tuple[str, ...]
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A rule of engines.toml, whose head explains the fields."""

    engine: str
    dialects: tuple[str, ...]
    loads: bool
    known: Known
    why: str = ""
    hint: str = ""
    caution: str = ""
    formats: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    when: str = ""
    anything: bool = False

    def holds(self, written: Written) -> bool:
        """Whether the rule applies to a checkpoint."""
        return (
            written.dialect in self.dialects
            and (self.anything or bool(written.experts))
            and (not self.formats or bool({*self.formats} & {*written.experts}))
            and (not self.model_types or written.model_type in self.model_types)
            and (not self.when or self._happens(written))
        )

    def sentences(self, written: Written) -> list[str]:
        """The sentences of its warning."""
        why = self.why.format(reason=written.not_loaded)
        alone = {*written.experts} | written.formats <= {*self.formats}
        return [why, self.hint] if self.hint and alone else [why]

    def _happens(self, written: Written) -> bool:
        if self.when == "kept":
            return written.some_kept
        if self.when == "not loaded":
            return written.not_loaded is not None
        if self.when == "no static scales":
            return not written.static
        if self.when == "several":
            return len(written.experts) > 1
        if self.when == "ragged":
            return written.ragged
        if self.when == "float16":
            return written.dtype == "float16"
        assert self.when == f"no multiple of {_W4A8_MULTIPLE}", self.when
        return any(extent % _W4A8_MULTIPLE for shape in written.shapes for extent in shape)


def judge(written: Written) -> list[Verdict]:
    """The verdict for each engine, in the order of engines.toml."""
    engines, rules = _table()
    verdicts = []
    for engine, version in engines:
        holding = [rule for rule in rules if rule.engine == engine and rule.holds(written)]
        against = [rule for rule in holding if not rule.loads]
        # A dialect's failure applies to any model; loading is known only for models of our table.
        decisive = next(iter(against or ([] if written.described else holding)), None)
        verdicts.append(
            Verdict(
                engine=engine,
                version=version,
                loads=None if decisive is None else decisive.loads,
                known=None if decisive is None else decisive.known,
                why=tuple(s for rule in against for s in rule.sentences(written)),
                cautions=tuple(r.caution for r in holding if r.caution and not against),
            )
        )
    return verdicts


def warnings_of(verdicts: Iterable[Verdict]) -> list[str]:
    """All failures and cautions, each sentence once."""
    sentences = (text for verdict in verdicts for text in (*verdict.why, *verdict.cautions))
    return list(dict.fromkeys(sentences))


@cache
def _table() -> tuple[Sequence[tuple[str, str]], Sequence[_Rule]]:
    data = get_data(__name__, "engines.toml")
    assert data is not None
    table = tomllib.loads(data.decode())
    engines = [(entry["name"], entry["version"]) for entry in table["engine"]]
    rules = [_read(entry) for entry in table["rule"]]
    assert {rule.engine for rule in rules} <= {name for name, _ in engines}
    return engines, rules


def _read(entry: Mapping[str, Any]) -> _Rule:
    lists = {
        key: tuple(entry[key]) for key in ("dialects", "formats", "model_types") if key in entry
    }
    rule = _Rule(**{**entry, **lists})
    assert bool(rule.why) != rule.loads, entry
    assert rule.loads or not rule.caution, entry
    return rule
