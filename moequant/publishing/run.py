"""push(), which `moequant push` calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from moequant.conversion import DEFAULT_WORKERS
from moequant.errors import MoequantError, NumericsError
from moequant.publishing.files import PublishedFile
from moequant.publishing.hub import Destination, is_same
from moequant.publishing.plan import REPORT_FOLDER, plan_push
from moequant.storage.files import CONFIG_FILE, PREPARED_FOLDER, RECORD_FILE
from moequant.storage.folder import is_note
from moequant.storage.model_card import CARD_FILE
from moequant.units import first_of
from moequant.verification import check_integrity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.progress import Progress
    from moequant.publishing.plan import PushPlan
    from moequant.storage.hub import HubFile
    from moequant.verification import Report

_COMMIT_BYTES = 20_000_000_000
_COMMIT_FILES = 50
"""Most of a commit, unless one file is larger: what an interruption can cost to send again."""
_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """What was published.

    Attributes:
        plan: what was to be published.
        url: of the repository; None after a dry run.
        sent: names of the files that the hub did not have, in the order in which they were sent.
        removed: names of the files of another checkpoint that were removed.
    """

    plan: PushPlan
    url: str | None
    sent: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def push(
    converted: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = False,
    verification: Report | None = None,
    force: bool = False,
    overwrite: bool = False,
    include_prepared: bool = False,
    base_model: str | None = None,
    quality: str | Path | None = None,
    report: str | Path | None = None,
    pictures: Sequence[str | Path] = (),
    dry_run: bool = False,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> PushResult:
    """Publish a converted checkpoint on the Hugging Face hub, with a model card.

    The checkpoint must have been verified, and its files must be the verified ones: every byte is
    compared with moequant.json before, and what the hub has with it afterwards. config.json is
    added last, so that no engine loads a part. What was sent before is not sent again.

    Args:
        converted: directory of a checkpoint that moequant converted.
        repo_id: owner/name; created if there is none.
        revision: a branch, created if there is none; by default the main one.
        private: create the repository as a private one, and refuse one that is public; by default
            a new one is what the hub makes of it.
        verification: what `verify` returned of it; by default what `moequant verify` noted.
        force: publish it even if it was not verified, or has changed.
        overwrite: remove the files of another checkpoint in the repository.
        include_prepared: publish its prepared folders, too.
        base_model: id of the source on the hub; by default that which was converted.
        quality: a file of `moequant evaluate --json`, for the card.
        report: an HTML page about the checkpoint, published beside it.
        pictures: PNG, JPEG or SVG files, shown in the card.
        dry_run: only plan, without reading weights or asking the hub.
        workers: number of files read in parallel.
        progress: receives the progress of reading.

    Raises:
        ArgumentError, CheckpointError, DataError, UnsupportedError: as `plan_push`.
        NumericsError: files are not those that were written.
        UnreachableError: the hub does not answer.
        MoequantError: it was not verified; the token may not write; or the repository holds
            another checkpoint, or is public against `private`.
    """
    planned = partial(
        plan_push,
        converted,
        repo_id,
        revision=revision,
        verification=verification,
        include_prepared=include_prepared,
        base_model=base_model,
        quality=quality,
        report=report,
        pictures=pictures,
    )
    plan = planned()
    if dry_run:
        return PushResult(plan=plan, url=None)
    if plan.not_verified and not force:
        raise MoequantError(
            f"{plan.not_verified}, or publish it unverified with --force (force=True)"
        )
    found = check_integrity(
        plan.path, prepared=include_prepared, workers=workers, progress=progress
    )
    if not found.ok:
        changed = f"{plan.path}: not the files that were written: {found.problems[0]}"
        if not force:
            raise NumericsError(
                f"{changed}; convert again with --overwrite (overwrite=True), or publish them as "
                "they are with --force (force=True)"
            )
        plan = planned(changed=changed)
    return _publish(plan, private=private, overwrite=overwrite)


def _publish(plan: PushPlan, *, private: bool, overwrite: bool) -> PushResult:
    destination = Destination(repo_id=plan.repo_id, revision=plan.revision)
    destination.create(private=private)
    there = destination.files()
    stale = _stale(plan, there)
    if stale and not overwrite:
        raise MoequantError(
            f"{plan.repo_id}: holds other files: {_listed(stale)}; give another REPO_ID or "
            "--revision, or remove them with --overwrite (overwrite=True)"
        )
    missing = [file for file in (*plan.extras, *plan.files) if not is_same(file, there)]
    _send(destination, plan, there, missing, stale)
    return PushResult(
        plan=plan,
        url=destination.url,
        sent=tuple(file.name for file in missing),
        removed=tuple(stale),
    )


def _send(
    destination: Destination,
    plan: PushPlan,
    there: Mapping[str, HubFile],
    missing: Sequence[PublishedFile],
    stale: Sequence[str],
) -> None:
    """Remove what is stale and add what is missing: the card first, config.json last.

    The hub reads the card's front matter before anything is sent; and without config.json no engine
    takes the repository for whole.
    """
    removed = set(stale) | ({CONFIG_FILE} & there.keys() if missing else set())
    for batch in _batches([file for file in missing if file.name != CONFIG_FILE]) or [[]]:
        names = [file.name for file in batch]
        if batch or removed:
            message = f"Add {_listed(names)}" if batch else f"Remove {_listed(sorted(removed))}"
            destination.commit(message, add=batch, delete=sorted(removed - {*names}))
        removed = set()
    there = destination.files()
    _check_arrived(plan, there)
    config = next(file for file in plan.files if file.name == CONFIG_FILE)
    if not is_same(config, there):
        destination.commit(f"Add {CONFIG_FILE}", add=[_read(config)])


def _read(file: PublishedFile) -> PublishedFile:
    """A small file with its bytes, which can no longer change."""
    assert isinstance(file.content, Path)
    read = PublishedFile.of(file.name, file.content.read_bytes())
    if read.sha256 != file.sha256:
        raise MoequantError(
            f"{file.content}: changed while it was published; wait until nothing writes to it and "
            "run the same command again"
        )
    return read


def _stale(plan: PushPlan, there: Mapping[str, HubFile]) -> list[str]:
    """Files on the hub that are not of this checkpoint, and that an engine may read."""
    ours = {file.name: file for file in plan.files}
    record = ours[RECORD_FILE]
    same_conversion = is_same(record, there)
    stale = []
    for name in sorted(there):
        path = PurePosixPath(name)
        if name in ours:
            is_stale = not is_same(ours[name], there)
        elif path.parts[0] == PREPARED_FOLDER:
            is_stale = not same_conversion
        else:
            is_ours = is_note(path) or path.parts[0] in (CARD_FILE, REPORT_FOLDER)
            is_stale = not is_ours and not path.name.startswith(".")
        if is_stale:
            stale.append(name)
    return stale


def _batches(files: Sequence[PublishedFile]) -> list[list[PublishedFile]]:
    """The files in the order given, in groups for one commit each."""
    batches: list[list[PublishedFile]] = []
    for file in files:
        last = batches[-1] if batches else []
        total = sum(one.size_bytes for one in last) + file.size_bytes
        if not last or total > _COMMIT_BYTES or len(last) == _COMMIT_FILES:
            batches.append([])
        batches[-1].append(file)
    return batches


def _check_arrived(plan: PushPlan, there: Mapping[str, HubFile]) -> None:
    """Check that the hub has every file but config.json, as it is here."""
    lacking = [
        file.name for file in plan.files if file.name != CONFIG_FILE and not is_same(file, there)
    ]
    if lacking:
        raise MoequantError(
            f"{plan.repo_id}: {_listed(lacking)}: sent, but the hub has no such file or another "
            "content; check that no file changes meanwhile and that no .gitignore there names "
            "them, then run the same command again"
        )


def _listed(names: Sequence[str]) -> str:
    return first_of(names, _NAMES_SHOWN)
