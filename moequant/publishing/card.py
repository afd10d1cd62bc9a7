"""The model card of a published checkpoint."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant.conversion.reproduce import (
    ARCHITECTURE_FILE,
    RECIPE_FILE,
    architecture_file,
    conversion_command,
    recipe_file,
)
from moequant.formats import CONVERTIBLE
from moequant.publishing.markdown import code_block, link, plain, table
from moequant.publishing.metadata import merged_metadata
from moequant.publishing.quality import quality_table
from moequant.storage.documents import object_at
from moequant.storage.model_card import mark_of
from moequant.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moequant.publishing.metadata import SourceCard
    from moequant.publishing.quality import Quality
    from moequant.publishing.serving import ServedBy
    from moequant.verification.verified import NotedGroup, Verified

_KNOWN = {"tested": "a test", "read": "its sources", "seen": "a try", None: ""}
_LOADS = {True: "yes", False: "no", None: "not known"}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card is written from.

    Attributes:
        repo_id: where it will be.
        record: moequant.json.
        record_sha256: its digest in hex.
        groups: the published tensors; see `size_by_role`.
        base_model: id of the source on the hub; None if it is not known.
        source: the source's card.
        verified: that the checkpoint was verified; None if it was not.
        engines: how engines serve it.
        quality: figures of an evaluation, if there are any.
        report: path of a report in the repository, if there is one.
        pictures: captions of pictures, which may be empty, by path in the repository.
    """

    repo_id: str
    record: Mapping[str, Any]
    record_sha256: str
    groups: Sequence[Mapping[str, Any]]
    base_model: str | None
    source: SourceCard
    verified: Verified | None
    engines: Sequence[ServedBy]
    quality: Quality | None
    report: str | None
    pictures: Mapping[str, str]

    @property
    def formats(self) -> list[str]:
        """The formats of its quantized weights, that of most bytes first."""
        sizes: dict[str, int] = defaultdict(int)
        for group in self.groups:
            if group["format"] is not None:
                sizes[group["format"]] += group["bytes"]
        return sorted(sizes, key=lambda format: (-sizes[format], format))

    @property
    def name(self) -> str:
        """Name of the repository, without its owner."""
        return self.repo_id.partition("/")[2]


def model_card(facts: CardFacts) -> str:
    """The card, with the source's card below a mark; raises RecipeError for an invalid record."""
    metadata = merged_metadata(
        facts.source,
        base_model=facts.base_model,
        quantized=bool(facts.formats),
        tags=("moequant", *facts.formats, *_dialect_tag(facts)),
    )
    sections = [
        f"# {facts.name}", _summary(facts), *_figures(facts), *_errors(facts), *_quality(facts),
        *_serving(facts), *_pictures(facts), *_making(facts),
    ]  # fmt: skip
    sections += ["## The source's model card"] if facts.source.sha256 else []
    body = "\n\n".join((*sections, mark_of(facts.source.sha256)))
    return f"---\n{metadata}\n---\n\n{body}\n{facts.source.text}"


def _dialect_tag(facts: CardFacts) -> list[str]:
    dialect = facts.record.get("dialect")
    return [dialect] if facts.formats and isinstance(dialect, str) else []


def _summary(facts: CardFacts) -> str:
    if facts.base_model is None:
        source = "its source"
    else:
        source = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    recipe = facts.record.get("recipe")
    words = recipe.get("summary") if isinstance(recipe, dict) else None
    what = f" {words}" if isinstance(words, str) and words else ""
    made = f"Made from {source} by moequant {facts.record.get('moequant')}.{what}"
    if facts.verified is None:
        return f"{made}\n\n**Not verified:** these bytes were not compared with the source."
    return (
        f"{made}\n\nEvery byte was verified: it is what the recipe below makes of the source "
        f"(`moequant verify`, moequant {facts.verified.moequant})."
    )


def _figures(facts: CardFacts) -> Iterator[str]:
    before = _total(facts.record.get("source"), "files")
    after = _total(facts.record, "shards")
    yield "## Figures"
    rows = [("size of the source", before), ("size", after)]
    rows += [(f"format `{name}`", CONVERTIBLE[name].summary) for name in facts.formats]
    dialect = facts.record.get("dialect")
    if facts.formats:
        rows.append(("config.json is for", f"{dialect}"))
    yield table(["", ""], rows)
    yield table(
        ["role", "format", ">tensors", "dtypes", ">size"],
        [
            (g["role"], g["format"] or "as in the source", g["tensors"], " ".join(g["dtypes"]),
             size(g["bytes"]))
            for g in facts.groups
        ],
    )  # fmt: skip


def _total(table: object, key: str) -> str:
    """The bytes of a table of files in the record, which may have been edited."""
    files = table.get(key) if isinstance(table, dict) else None
    entries = files.values() if isinstance(files, dict) else ()
    sizes = [entry.get("bytes") for entry in entries if isinstance(entry, dict)]
    known = [one for one in sizes if isinstance(one, int)]
    return size(sum(known)) if known and len(known) == len(sizes) else "not known"


def _errors(facts: CardFacts) -> Iterator[str]:
    recorded = [*_recorded_errors(facts.record)]
    if facts.verified is None and not recorded:
        return
    yield "## Error"
    if facts.verified is not None and facts.verified.report.formats:
        report = facts.verified.report
        yield (
            "The relative error `||w - dequantize(q)|| / ||w||` of the weights, measured on the "
            "published bytes:"
        )
        yield table(
            ["format", ">weights", ">SQNR", ">error", ">worst", "worst weight"],
            [
                (
                    f.format, f.weights, "-" if f.sqnr_db is None else f"{f.sqnr_db:.2f} dB",
                    _percent(f.relative_error), _percent(f.worst.relative_error), f.worst.name,
                )
                for f in report.formats
            ],
        )  # fmt: skip
        yield table(
            ["role", "projection", "format", ">weights", ">error of a layer"],
            _errors_by_role(report.errors),
        )
        if report.layers:
            yield (
                "Outputs of expert layers for random inputs, `||y - y_source|| / ||y_source||`, "
                "without quantized activations, and with them as engines quantize them:"
            )
            yield table(
                [">layer", "format", ">error", ">with activations"],
                [
                    (one.layer, one.format, _percent(one.layer_error),
                     _percent(one.quantized_activations_error))
                    for one in report.layers
                ],
            )  # fmt: skip
            for one in report.layers:
                if one.activations_not_measured is not None:
                    yield (
                        f"Layer {one.layer} with activations: not measured, because "
                        f"{one.activations_not_measured}."
                    )
    yield from recorded


def _errors_by_role(groups: Sequence[NotedGroup]) -> Iterator[tuple[object, ...]]:
    members: dict[tuple[str, str | None, str], list[NotedGroup]] = defaultdict(list)
    for group in groups:
        members[group.role, group.projection, group.format].append(group)
    for (role, projection, format), found in members.items():
        errors = [g.relative_error for g in found if g.relative_error is not None]
        ends = dict.fromkeys(_percent(one) for one in (min(errors), max(errors))) if errors else {}
        weights = sum(group.weights for group in found)
        yield role, projection or "", format, weights, " to ".join(ends) or "-"


def _recorded_errors(record: Mapping[str, Any]) -> Iterator[str]:
    """What the conversion of weights that were quantized before lost, by the record."""
    entries = record.get("requantization_errors")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        return
    yield "What the formats cost beside the source's own, quantized weights:"
    yield table(
        ["role", "from", "to", ">weights", ">exact", ">error"],
        [
            (*(e.get(key, "") for key in ("role", "source", "format", "weights", "exact")),
             _percent(e.get("relative_error")))
            for e in entries
        ],
    )  # fmt: skip


def _percent(value: object) -> str:
    return f"{value:.3%}".replace("%", " %") if isinstance(value, float | int) else "-"


def _quality(facts: CardFacts) -> Iterator[str]:
    if facts.quality is None:
        return
    data, test = facts.quality.data, facts.quality.test
    run_as = {
        "weights": f"its dequantized weights, in {test.dtype}",
        "runtime": "moequant's runtime, with its activations",
    }
    yield "## Quality"
    yield table(
        ["", ">perplexity", ">KL divergence", ">99th percentile", ">same top token"],
        quality_table(facts.quality),
    )
    yield (
        f"Against the predictions of the source, by `moequant evaluate` on {data.windows} windows "
        f"of {data.window_tokens} tokens (SHA-256 of the tokens {data.sha256}), as "
        f"{run_as.get(test.run_as, test.run_as)}. The KL divergence is in nats a token, ± its "
        "standard error."
    )


def _serving(facts: CardFacts) -> Iterator[str]:
    yield "## Serve it"
    yield table(
        ["engine", "loads it", "known from", "tensor-parallel ranks"],
        [
            (e.engine, _LOADS[e.loads], _KNOWN.get(e.known, ""), ", ".join(map(str, e.tp)) or "-")
            for e in facts.engines
        ],
    )
    yield (
        "By the rules of `moequant check`: *a test* loads such files with that engine on a CPU; "
        "*its sources* were read, and it was not run; *a try* was made once. A model larger than a "
        "GPU needs several ranks: `--tensor-parallel-size N` of vLLM, `--tp-size N` of SGLang."
    )
    for engine in facts.engines:
        for gpus, command in engine.commands.items():
            yield f"{engine.engine} on {gpus}:" if gpus else f"{engine.engine}:"
            yield code_block(engine.language, command)
    remarks = [f"* {e.engine}: {text}" for e in facts.engines for text in e.remarks]
    if remarks:
        yield "\n".join(remarks)


def _pictures(facts: CardFacts) -> Iterator[str]:
    if facts.report is not None or facts.pictures:
        yield "## Report"
    if facts.report is not None:
        yield f"{link(facts.report, facts.report)} is a page to download and open in a browser."
    for picture, caption in facts.pictures.items():
        name = picture.rpartition("/")[2].rpartition(".")[0]
        yield from [f"{plain(caption)}:"] if caption else []
        yield f"!{link(name, picture)}"


def _making(facts: CardFacts) -> Iterator[str]:
    record = facts.record
    yield "## How it was made"
    yield code_block("shell", conversion_command(record, facts.base_model or "SOURCE", facts.name))
    files = {RECIPE_FILE: recipe_file(record), ARCHITECTURE_FILE: architecture_file(record)}
    for name, text in files.items():
        if text is not None:
            yield f"with this {name}:"
            yield code_block("toml", text)
    yield table(["", ""], [row for row in _provenance(facts) if row[1]])
    yield (
        "`moequant.json` has the SHA-256 of every file. `moequant verify DIRECTORY --integrity` "
        "compares them, and `moequant verify DIRECTORY --against SOURCE` converts again and "
        "compares every byte."
    )


def _provenance(facts: CardFacts) -> Iterator[tuple[str, str]]:
    record = facts.record
    source = object_at(record, "source")
    yield "source revision", _text(source.get("commit"))
    yield "moequant", _text(record.get("moequant"))
    yield "torch", _text(record.get("torch"))
    yield "SHA-256 of the source's config.json", _text(source.get("config_sha256"))
    yield "SHA-256 of the plan", _text(record.get("plan_sha256"))
    yield "SHA-256 of moequant.json", facts.record_sha256
    for key, name in (("statistics", "statistics"), ("activation_scales", "activation scales")):
        entry = record.get(key)
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        yield f"SHA-256 of the {name}", _text(digest)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
