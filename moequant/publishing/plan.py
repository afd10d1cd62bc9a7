"""What a push would publish: files, sizes, the model card; read from the checkpoint alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import ArgumentError, CheckpointError, UnsupportedError
from moequant.models import find_architecture
from moequant.publishing.card import CardFacts, model_card
from moequant.publishing.files import PublishedFile, checkpoint_files, left_out
from moequant.publishing.metadata import NO_CARD, SourceCard, read_card
from moequant.publishing.quality import read_quality
from moequant.publishing.serving import serving_of
from moequant.reporting import pictures_of
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.documents import object_at, read_document
from moequant.storage.files import MANIFEST_FILE, PAGE_SUFFIXES, PREPARED_FOLDER, RECORD_FILE
from moequant.storage.given_path import given_path
from moequant.storage.model_card import CARD_FILE
from moequant.storage.reader import FixedFile
from moequant.verification.stored import existing_directory
from moequant.verification.verified import Verified, as_verified, digests_of, read_verified
from moequant.weights.converted import described_architectures
from moequant.weights.sizes import roles_of, size_by_role
from moequant.weights.source_model import seen_as_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.verification import Report

REPORT_FOLDER = "moequant-report"
"""Folder of a report and of pictures in the repository."""
PICTURES = (".png", ".jpg", ".jpeg", ".svg")
"""Suffixes of pictures."""
# Fewer names than git takes: they are parts of commands in the card.
_BRANCH = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|[./](?![./]|$))*")


@dataclass(frozen=True, kw_only=True)
class PushPlan:
    """What a push would publish.

    Attributes:
        path: the directory of the checkpoint.
        repo_id: owner/name of the repository.
        revision: a branch; None for the main one.
        files: of the checkpoint.
        extras: the model card, a report, pictures.
        card: the text of the model card.
        left_out: files and folders of the checkpoint that are not published.
        not_verified: why the checkpoint does not count as verified; None if it does.
        warnings: what the card lacks.
    """

    path: Path
    repo_id: str
    revision: str | None
    files: tuple[PublishedFile, ...] = field(repr=False)
    extras: tuple[PublishedFile, ...] = field(repr=False)
    card: str = field(repr=False)
    left_out: tuple[str, ...]
    not_verified: str | None
    warnings: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in (*self.files, *self.extras))


def plan_push(
    converted: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    verification: Report | None = None,
    include_prepared: bool = False,
    base_model: str | None = None,
    quality: str | Path | None = None,
    report: str | Path | None = None,
    pictures: Sequence[str | Path] = (),
    changed: str | None = None,
) -> PushPlan:
    """Say what `push` would publish, with its arguments; reads no weights and asks no hub.

    `changed` is what is known to differ from what was verified: then the checkpoint does not count
    as verified, and every file is read for its digest.

    Raises:
        CheckpointError: no converted checkpoint of moequant, a file of it is missing, or another
            cannot be read.
        DataError: `quality` has no figures of the checkpoint.
        ArgumentError: `repo_id` or `base_model` is no id; `revision` is no name of a branch; or a
            page or picture is none, or two would have one name.
        UnsupportedError: an unknown architecture or quantization.
    """
    check_repo_id(repo_id)
    if revision is not None:
        _check_branch(revision)
    if base_model is not None:
        check_repo_id(base_model)
    figures = None
    if quality is not None:
        figures = given_path("quality", quality, what="a file of moequant evaluate --json")
    path = existing_directory(converted)
    record = _read_record(path)
    files = checkpoint_files(path, record, include_prepared=include_prepared)
    targets = [p.name for p in _prepared_targets(files)]
    verified = as_verified(verification) if verification else read_verified(path)
    not_verified = changed or why_not_verified(path, verified, targets)
    source_card = _source_card(path, record)
    extras, captions = _extras(report, pictures)
    base = base_model or _recorded_source(record) or source_card.base_model
    checkpoint = Checkpoint.open(path)
    card = model_card(
        CardFacts(
            repo_id=repo_id,
            record=record,
            record_sha256=files[0].sha256,
            groups=_groups(checkpoint),
            base_model=base,
            source=source_card,
            verified=None if not_verified else verified,
            engines=serving_of(checkpoint, repo_id, revision),
            quality=None if figures is None else read_quality(figures, path),
            report=None if report is None else extras[0].name,
            pictures=captions,
        )
    )
    return PushPlan(
        path=path,
        repo_id=repo_id,
        revision=revision,
        files=tuple(file.read_again() for file in files) if changed else tuple(files),
        extras=(PublishedFile.of(CARD_FILE, card.encode()), *extras),
        card=card,
        left_out=tuple(left_out(path, files)),
        not_verified=not_verified,
        warnings=(
            *_warnings(source_card, base, {file.name for file in files}),
            *_no_prepared(path, asked=include_prepared, found=bool(targets)),
        ),
    )


def check_repo_id(repo_id: str) -> None:
    """Check that a text is an id, owner/name; raises ArgumentError."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented
        validate_repo_id,
    )

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        valid = False
    else:
        valid = isinstance(repo_id, str) and repo_id.count("/") == 1
    if not valid:
        raise ArgumentError(f"{repo_id!r}: no id of a repository on the hub; write owner/name")


def _check_branch(revision: str) -> None:
    if not (isinstance(revision, str) and _BRANCH.fullmatch(revision)):
        raise ArgumentError(
            f"{revision!r}: no name of a branch; give letters, digits and . _ - / with --revision"
        )


def _read_record(path: Path) -> dict[str, Any]:
    """The moequant.json of a checkpoint."""
    if not (path / RECORD_FILE).is_file():
        raise CheckpointError(
            f"{path}: has no {RECORD_FILE}, so moequant did not convert it, or not to the end; "
            "push publishes what moequant convert wrote"
        )
    return read_document(FixedFile.at(path / RECORD_FILE))


def why_not_verified(path: Path, verified: Verified | None, targets: Sequence[str]) -> str | None:
    """Why a checkpoint does not count as verified, and what to do; None if it does.

    Args:
        path: its directory.
        verified: the note that it was.
        targets: of the prepared folders that count, too.
    """
    remedy = f"run moequant verify {shlex.quote(str(path))} --against SOURCE"
    if verified is None:
        return f"{path}: was not verified; {remedy}"
    record, manifests = digests_of(path)
    if verified.report.record_sha256 != record:
        return f"{path}: was converted again since it was verified; {remedy} again"
    changed = [
        target
        for target in targets
        if verified.report.manifests_sha256.get(target) != manifests.get(target)
    ]
    if changed:
        return f"{path}: was prepared for {changed[0]} since it was verified; {remedy} again"
    return None


def _prepared_targets(files: Sequence[PublishedFile]) -> list[Path]:
    """The prepared folders of which the manifest is published."""
    paths = [Path(file.name) for file in files]
    return [p.parent for p in paths if p.name == MANIFEST_FILE and p.parts[0] == PREPARED_FOLDER]


def _source_card(path: Path, record: Mapping[str, Any]) -> SourceCard:
    file = path / CARD_FILE
    recorded = object_at(object_at(record, "source"), "sidecars").get(CARD_FILE)
    if not file.is_file():
        return NO_CARD
    return read_card(file.read_bytes(), recorded_sha256=recorded)


def _recorded_source(record: Mapping[str, Any]) -> str | None:
    """The repository that was converted; None for a directory."""
    repository = object_at(record, "source").get("repository")
    return repository if isinstance(repository, str) else None


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    own = described_architectures(checkpoint.path)
    architecture = find_architecture(checkpoint.config, own, names=checkpoint.tensors)
    converted = seen_as_source(checkpoint, own)
    return size_by_role(roles_of(checkpoint.tensors.values(), architecture, converted))


def _extras(
    report: str | Path | None, pictures: Sequence[str | Path]
) -> tuple[list[PublishedFile], dict[str, str]]:
    """The report, then the pictures given and those in it; and the captions of pictures by name."""
    if isinstance(pictures, str | bytes) or not isinstance(pictures, Iterable):
        raise UnsupportedError(f"pictures is {show(pictures)}, but must be a list of paths")
    pages = [] if report is None else [given_path("report", report, what="a page")]
    given = [given_path("a picture", picture, what="a file") for picture in pictures]
    for what, paths, suffixes in (("page", pages, PAGE_SUFFIXES), ("picture", given, PICTURES)):
        wrong = next((p for p in paths if p.suffix.lower() not in suffixes), None)
        if wrong is not None:
            raise ArgumentError(f"{wrong}: not a {what}; give files {', '.join(suffixes)}")
    files: list[tuple[str, Path | bytes]] = [
        (_published_name(file), file) for file in pages + given
    ]
    captions = {f"{REPORT_FOLDER}/{name}": "" for name, _ in files[len(pages) :]}
    for picture in (p for page in pages for p in pictures_of(_text_of(page))):
        files.append((f"{picture.name}.svg", picture.svg.encode()))
        captions.setdefault(f"{REPORT_FOLDER}/{picture.name}.svg", picture.caption)
    names = [f"{REPORT_FOLDER}/{name}" for name, _ in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(f"{twice}: two files would have this name; rename one")
    extras = [PublishedFile.of(name, file) for name, (_, file) in zip(names, files, strict=True)]
    return extras, captions


def _text_of(page: Path) -> str:
    """The text of a page, which other tools may have made: what is no UTF-8 is replaced."""
    return FixedFile.at(page).path.read_text("utf-8", errors="replace")


def _published_name(file: Path) -> str:
    """The name of a file with a suffix that `verify` knows as that of a note."""
    suffix = file.suffix.lower()
    return file.stem + {".htm": ".html", ".jpeg": ".jpg"}.get(suffix, suffix)


def _no_prepared(path: Path, *, asked: bool, found: bool) -> list[str]:
    if not asked or found:
        return []
    return [f"{path}: no prepared folder, so none is published; make one with moequant prepare"]


def _warnings(card: SourceCard, base_model: str | None, published: set[str]) -> list[str]:
    warnings = list(card.warnings)
    if base_model is None:
        warnings.append(
            "the source was a directory, so the card names no base model; give its id on the hub "
            "with --base-model owner/name"
        )
    if not card.metadata.get("license"):
        warnings.append(
            "the source's model card names no license, so the card names none; check under which "
            "terms it may be published"
        )
    link = card.metadata.get("license_link")
    if isinstance(link, str) and "://" not in link and link.removeprefix("./") not in published:
        warnings.append(
            f"the source's model card links to its license, {link}, but the checkpoint has no such "
            "file; put it into the source and convert again"
        )
    return warnings
