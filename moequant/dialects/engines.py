"""What engines do with a converted checkpoint, by the table engines.toml beside this file."""

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
    """What rules of the table ask of a checkpoint.

    Attributes:
        dialect: name of its dialect.
        model_type: of config.json.
        formats: of modules that are quantized and no routed experts.
        experts: formats of the routed experts, in the order they come.
        shapes: [N, K] of routed experts that are quantized.
        ragged: whether rows of a linear layer do not fill the blocks of its format.
        dtype: of config.json, in which engines compute; None where it has none.
        some_kept: whether the experts of some layers are kept, and of others not.
        not_loaded: why transformers does not load this model from compressed-tensors; None if it
            does.
        described: whether a user's file or a record describes the model, of which then nobody
            knows whether an engine has it.
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
    described: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether an engine loads a checkpoint, with the weights as they are.

    Attributes:
        engine: its name.
        version: of which this is known.
        loads: None where nobody knows.
        known: how; None where nobody does.
        why: sentences that say what goes wrong; empty where it loads.
        cautions: sentences about what it then computes with, besides the weights.
    """

    engine: str
    version: str
    loads: bool | None
    known: Known | None
    why: tuple[str, ...]
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A rule of the table, whose head says what the fields are."""

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
        """Whether it speaks of a checkpoint."""
        return (
            written.dialect in self.dialects
            and (self.anything or bool(written.experts))
            and (not self.formats or bool({*self.formats} & {*written.experts}))
            and (not self.model_types or written.model_type in self.model_types)
            and (not self.when or self._happens(written))
        )

    def sentences(self, written: Written) -> list[str]:
        """What it warns of."""
        why = self.why.format(reason=written.not_loaded)
        alone = {*written.experts} | written.formats <= {*self.formats}
        return [why, self.hint] if self.hint and alone else [why]

    def _happens(self, written: Written) -> bool:
        if self.when == "kept":
            return written.some_kept
        if self.when == "not loaded":
            return written.not_loaded is not None
        if self.when == "several":
            return len(written.experts) > 1
        if self.when == "ragged":
            return written.ragged
        if self.when == "float16":
            return written.dtype == "float16"
        assert self.when == f"no multiple of {_W4A8_MULTIPLE}", self.when
        return any(extent % _W4A8_MULTIPLE for shape in written.shapes for extent in shape)


def judge(written: Written) -> list[Verdict]:
    """What each engine of the table does with a checkpoint, in the order of the table."""
    engines, rules = _table()
    verdicts = []
    for engine, version in engines:
        holding = [rule for rule in rules if rule.engine == engine and rule.holds(written)]
        against = [rule for rule in holding if not rule.loads]
        # What is wrong with a dialect is so for any model; that it loads is known of ours alone.
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
    """All that goes wrong, or is not as one may expect, each sentence once."""
    said = (sentence for verdict in verdicts for sentence in (*verdict.why, *verdict.cautions))
    return list(dict.fromkeys(said))


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
