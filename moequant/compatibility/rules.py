"""Whether engines load a checkpoint with the right weights, by the rules in rules.toml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from moequant._version import __version__
from moequant.compatibility.facts import UNQUANTIZED, Placement, padded_vocabulary
from moequant.compatibility.tables import fields_of, read_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from moequant.compatibility.facts import Defect, Facts

Known = Literal["tested", "read", "seen"]
Parallel = Literal["whole", "divided", "unknown", "none"]

_ANYWHERE = Placement()
# Linear layers of which tensor parallelism divides the columns, and those of which it divides rows.
_DIVIDED_COLUMNS = ("o_proj", "down_proj", "w2")
_DIVIDED_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3")
# Those that it divides up to one head a rank; more ranks have copies.
_DIVIDED_HEADS = ("k_proj", "v_proj")
_CONDITIONS: Mapping[str, Callable[[Facts, Placement], bool]] = {
    "kept": lambda facts, _: facts.some_kept,
    "not loaded": lambda facts, _: facts.not_loaded is not None,
    "several": lambda facts, _: len(facts.experts) > 1,
    "fp4 activations": lambda facts, _: facts.fp4_activations,
    "ragged": lambda facts, _: facts.ragged,
    "float16": lambda facts, _: facts.dtype == "float16",
    "shared apart": lambda facts, _: facts.shared_apart,
    "no classes": lambda facts, _: facts.classes == (),
    "another model": lambda facts, _: facts.names_another_model,
    "another task": lambda facts, _: facts.names_another_task,
    "unknown act_fn": lambda facts, _: facts.unknown_act_fn,
    "foreign act_fn": lambda facts, _: facts.foreign_act_fn is not None,
    "not finite": lambda facts, _: bool(facts.not_finite),
    "unquantized": lambda facts, _: facts.dialect == UNQUANTIZED,
    "several ranks": lambda _, at: at.tp > 1 or at.ep > 1,
    "ep no multiple of tp": lambda _, at: at.ep > 1 and at.ep % at.tp > 0,
    "tp no multiple of ep": lambda _, at: at.tp % at.ep > 0,
    "kv heads and tp do not divide": lambda facts, at: _neither_divides(facts.kv_heads, at.tp),
}
"""What `when` of a rule may say."""
_ABOUT_CONFIG = ("no classes", "another model", "unknown act_fn", "foreign act_fn")
"""Of these, those about config.json alone."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine of rules.toml, whose head explains the fields."""

    key: str
    name: str
    version: str
    parallel: Parallel

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version}"

    def ranks_of_an_expert(self, placement: Placement) -> int:
        """Among how many ranks the rows of an expert are divided."""
        if placement.ep == 1:
            return placement.tp
        return 1 if self.parallel == "whole" else max(placement.tp // placement.ep, 1)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a rule says of a checkpoint.

    Attributes:
        rule: its id.
        text: a sentence.
        next: another, about what to do; empty if there is nothing to say.
        source: where the engine's behaviour is from.
        names: the tensors or modules that it is about; empty if it is about all.
    """

    rule: str
    text: str
    next: str
    source: str
    names: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """The text, and what to do."""
        return f"{self.text} {self.next}".strip()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether an engine loads a checkpoint with the right weights.

    Attributes:
        engine: the engine's name.
        version: the version that was tested or read.
        loads: None if unknown.
        known: how it is known; None if unknown.
        against: what fails; empty if it loads.
        remarks: differences other than the weights.
        options: options that its server needs to run it right, such as "--dtype bfloat16"; empty
            if it does not load.
    """

    engine: str
    version: str
    loads: bool | None
    known: Known | None
    against: tuple[Said, ...] = ()
    remarks: tuple[Said, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def why(self) -> tuple[str, ...]:
        """What fails, and what to do about it."""
        return tuple(said.message for said in self.against)

    @property
    def cautions(self) -> tuple[str, ...]:
        """Differences other than the weights."""
        return tuple(said.message for said in self.remarks)


@dataclass(frozen=True, kw_only=True)
class EngineRule:
    """A rule of rules.toml, whose head explains the fields."""

    id: str
    engines: tuple[str, ...]
    loads: bool
    known: Known
    source: str
    why: str = ""
    next: str = ""
    caution: str = ""
    options: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    other_model_types: tuple[str, ...] = ()
    when: str = ""
    lacks: tuple[str, ...] = ()
    defect: str = ""
    static: bool | None = None
    multiples: Mapping[str, int] | None = None
    from_capability: tuple[int, int] | None = None
    to_capability: tuple[int, int] | None = None
    anything: bool = False

    @property
    def is_about_model(self) -> bool:
        """Whether it is about config.json alone, so that no format or dialect helps."""
        return not self.loads and (bool(self.lacks) or self.when in _ABOUT_CONFIG)

    def holds(self, facts: Facts, engine: EngineInfo, placement: Placement) -> bool:
        """Whether the rule applies to a checkpoint on an engine."""
        return (
            engine.name in self.engines
            and (not self.dialects or facts.dialect in self.dialects)
            and (self.anything or bool(facts.experts))
            and (not self.formats or bool({*self.formats} & {*facts.experts}))
            and (not self.model_types or facts.model_type in self.model_types)
            and facts.model_type not in self.other_model_types
            and self.static in (None, facts.static)
            and (not self.when or _CONDITIONS[self.when](facts, placement))
            and (not self.lacks or bool(self.lacking(facts)))
            and (not self.defect or self.found_in(facts, engine) is not None)
            and (self.multiples is None or self._cuts_apart(facts, engine, placement))
            and placement.is_within(self.from_capability, self.to_capability)
        )

    def found_in(self, facts: Facts, engine: EngineInfo) -> Defect | None:
        """The defect that the rule is about, if the checkpoint has it."""
        ours = (d for d in facts.defects if d.id == self.defect and d.concerns(engine.name))
        return next(ours, None)

    def lacking(self, facts: Facts) -> list[str]:
        """The keys that config.json lacks; none if its keys are not known."""
        there = facts.config_keys
        return [] if there is None else [key for key in self.lacks if key not in there]

    def said(self, facts: Facts, engine: EngineInfo, placement: Placement) -> Said:
        """What it says of a checkpoint to which it applies."""
        defect = self.found_in(facts, engine)
        ranks = engine.ranks_of_an_expert(placement)
        # A hint at another dialect is none where that dialect does not hold the other formats.
        hints = not self.formats or {*facts.experts} | facts.formats <= {*self.formats}
        return Said(
            rule=self.id,
            text=(self.why or self.caution).format(
                engine=engine.title,
                reason=facts.not_loaded,
                lacking=" and no ".join(self.lacking(facts)),
                classes=", ".join(facts.classes or ()),
                model_type=facts.model_type,
                act_fn=facts.foreign_act_fn,
                not_finite=facts.not_finite,
                model_class=next(iter(facts.model_classes), "that of its original release"),
                found=None if defect is None else defect.found,
                tp=placement.tp,
                ep=placement.ep,
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                experts=facts.expert_count,
                vocabulary=facts.vocabulary,
                sizes=f"hidden size {facts.hidden}, {_of_rank(facts.intermediate, ranks)}",
            ),
            next=self.next if hints else "",
            source=self.source,
            names=() if defect is None else defect.names,
        )

    def _cuts_apart(self, facts: Facts, engine: EngineInfo, placement: Placement) -> bool:
        """Whether a size that the rule names is known and no multiple of what it must be."""
        assert self.multiples is not None
        ranks = engine.ranks_of_an_expert(placement)
        divisors = dict.fromkeys(("heads", "vocabulary"), placement.tp)
        divisors |= {"rank": ranks, "experts": placement.ep}
        sizes = {
            "hidden": facts.hidden,
            "intermediate": facts.intermediate,
            "rank": facts.intermediate,
            "heads": facts.heads,
            "experts": facts.expert_count,
            "vocabulary": facts.vocabulary and padded_vocabulary(facts.vocabulary),
        }
        for name, multiple in self.multiples.items():
            if name == "linears":
                tp, heads = placement.tp, facts.kv_heads
                if any(_is_cut(linear, multiple, tp, heads) for linear in facts.linears):
                    return True
                continue
            size = sizes[name]
            if size is not None and size % (multiple * divisors.get(name, 1)):
                return True
        return False


def judge(
    facts: Facts, placement: Placement = _ANYWHERE, engines: Collection[str] | None = None
) -> list[Verdict]:
    """The verdict for each engine, in the order of rules.toml.

    Args:
        facts: of the checkpoint.
        placement: where it is to run.
        engines: keys of the engines to judge; by default all but moequant's own.
    """
    if engines is None:
        engines = SERVING
    return [_verdict(facts, engine, placement) for key, engine in ENGINES.items() if key in engines]


def warnings_of(verdicts: Iterable[Verdict]) -> list[str]:
    """All failures and cautions, each once."""
    messages = (text for verdict in verdicts for text in (*verdict.why, *verdict.cautions))
    return list(dict.fromkeys(messages))


def failures_of_model(verdict: Verdict) -> list[str]:
    """What fails because of config.json alone, whatever the format, as of a key that it lacks."""
    of_model = {rule.id for rule in rules() if rule.is_about_model}
    return [said.message for said in verdict.against if said.rule in of_model]


def rules() -> Sequence[EngineRule]:
    """Every rule, in the order of rules.toml."""
    return _table()[1]


def _verdict(facts: Facts, engine: EngineInfo, placement: Placement) -> Verdict:
    holding = [rule for rule in rules() if rule.holds(facts, engine, placement)]
    against = [rule for rule in holding if not rule.loads]
    remarks = [rule for rule in holding if rule.loads and rule.caution and not against]
    # A failure applies to any model; loading is known only for models of our table, and where
    # weights are not divided in a way that nobody has looked at.
    is_divided = placement.tp > 1 or placement.ep > 1
    unknown = facts.described or (is_divided and engine.parallel == "unknown")
    saying_yes = [rule for rule in holding if not rule.caution and not rule.options]
    deciding = against or ([] if unknown else saying_yes)
    decisive = next(iter(deciding), None)
    return Verdict(
        engine=engine.name,
        version=engine.version,
        loads=None if decisive is None else decisive.loads,
        known=None if decisive is None else decisive.known,
        against=tuple(rule.said(facts, engine, placement) for rule in against),
        remarks=tuple(rule.said(facts, engine, placement) for rule in remarks),
        options=() if against else _options(holding),
    )


def _options(holding: Iterable[EngineRule]) -> tuple[str, ...]:
    """The options of rules, of each name the last."""
    return tuple({text.split()[0]: text for rule in holding for text in rule.options}.values())


def _neither_divides(heads: int | None, ranks: int) -> bool:
    return heads is not None and max(heads, ranks) % min(heads, ranks) > 0


def _is_cut(linear: tuple[str, int, int], multiple: int, tp: int, kv_heads: int | None) -> bool:
    """Whether tensor parallelism cuts blocks of a linear layer."""
    leaf, rows, columns = linear
    if tp == 1:
        return False
    if leaf in _DIVIDED_HEADS and kv_heads is not None:
        return bool(rows % (multiple * min(tp, kv_heads)))
    size = {**dict.fromkeys(_DIVIDED_COLUMNS, columns), **dict.fromkeys(_DIVIDED_ROWS, rows)}
    return bool(size.get(leaf, 0) % (multiple * tp))


def _of_rank(intermediate: int | None, ranks: int) -> str:
    whole = f"intermediate size {intermediate}"
    if ranks == 1 or intermediate is None:
        return whole
    share = f"{intermediate / ranks:g}"
    return f"{whole} by {ranks} ranks, which is {share}"


@cache
def _table() -> tuple[dict[str, EngineInfo], Sequence[EngineRule]]:
    table = read_table("rules.toml")
    engines = [EngineInfo(**{"version": __version__, **entry}) for entry in table["engine"]]
    found = [_read(entry) for entry in table["rule"]]
    names = {engine.name for engine in engines}
    assert all({*rule.engines} <= names for rule in found)
    assert len({rule.id for rule in found}) == len(found)
    return {engine.key: engine for engine in engines}, found


def _read(entry: Mapping[str, Any]) -> EngineRule:
    rule = EngineRule(**fields_of(entry))
    assert not rule.when or rule.when in _CONDITIONS, entry
    assert bool(rule.why) != rule.loads, entry
    assert rule.loads or not (rule.caution or rule.options), entry
    return rule


ENGINES: Mapping[str, EngineInfo] = _table()[0]
"""By the names that options take."""
OWN = "moequant"
"""The key of moequant's own runtime."""
SERVING: Mapping[str, EngineInfo] = {k: e for k, e in ENGINES.items() if k != OWN}
"""The engines of others."""
