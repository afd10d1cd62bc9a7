"""What a report says of one converted checkpoint, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from moequant.compatibility import check_checkpoint
from moequant.errors import CheckpointError, MoequantError, UnsupportedError
from moequant.models import find_architecture
from moequant.reporting.codes import count_codes
from moequant.reporting.origin import describe_origin
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.documents import read_document
from moequant.storage.files import CONFIG_FILE, RECORD_FILE
from moequant.storage.reader import FixedFile
from moequant.weights.converted import described_architectures
from moequant.weights.encoded import EncodedInfo
from moequant.weights.sizes import roles_in, size_by_role
from moequant.weights.source_model import quantization_config_of, read_source, source_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from moequant.models import Architecture, TensorRole
    from moequant.weights.source_model import SourceModel

    Sizes = list[dict[str, Any]]
    Opened = tuple[Checkpoint, tuple[Architecture, ...]]

_LAYERS_OF_CHECKED = 3


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the checks of a converted checkpoint said.

    Attributes:
        verification: the result of verify, as `verification_document`; None if it did not run.
        earlier: whether that is from a file.
        integrity: the result of check_integrity, as plain data; None if it did not run.
        seconds: how long the checks took here.
    """

    verification: dict[str, Any] | None = None
    earlier: bool = False
    integrity: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What they found, at most the first of each check."""
        results = (self.verification, self.integrity)
        return [problem for result in results if result for problem in result["problems"]]

    @property
    def problem_count(self) -> int:
        """How many problems they found."""
        results = (self.verification, self.integrity)
        return sum(result["problem_count"] for result in results if result)

    def verdict(self) -> str:
        """`faulty`, `verified`, `verified_earlier`, `unchanged` or `unchecked`.

        `verified_earlier`: it may have changed since. `unchanged`: since it was written, but it was
        not compared with its source.
        """
        if self.problem_count:
            return "faulty"
        if self.verification is not None:
            changed = self.earlier and self.integrity is None
            return "verified_earlier" if changed else "verified"
        return "unchecked" if self.integrity is None else "unchanged"


def describe_output(
    path: Path,
    name: str,
    checked: Checked,
    *,
    source: str | None,
    architecture: str | Path | None,
    before: Sizes | None,
    workers: int,
) -> dict[str, Any]:
    """Everything about one checkpoint.

    A part that cannot be had is None, with the reason under `not_read`.

    Args:
        path: its directory.
        name: what the report calls it.
        checked: what checks said of it.
        source: the source as the user calls it.
        architecture: a file that describes its architecture.
        before: `size_by_role` of the source's headers, if it was opened.
        workers: number of weights read in parallel.

    Raises:
        CheckpointError: it cannot be read, or is not converted, although no check found a problem.
        UnsupportedError: an unknown architecture or quantization, likewise.
    """
    document: dict[str, Any] = {
        "name": name,
        "path": str(path),
        "verdict": checked.verdict(),
        "problem_count": checked.problem_count,
        "problems": checked.problems,
        "verification": checked.verification,
        "verified_earlier": checked.earlier,
        "integrity": checked.integrity,
        "check_seconds": round(checked.seconds, 3),
        "before": before,
        "not_read": {},
    }

    @cache
    def opened() -> Opened:
        return Checkpoint.open(path), described_architectures(path, architecture)

    @cache
    def seen() -> SourceModel:
        checkpoint, own = opened()
        config = source_config(checkpoint)
        _check_converted(path, config)
        return read_source(checkpoint.tensors, config, own)

    parts: dict[str, Callable[[], Any]] = {
        "origin": lambda: _origin(path, source),
        "compatibility": lambda: _compatibility(*opened(), checked),
        "after": lambda: size_by_role(roles_in(opened()[0].tensors, seen())),
        "codes": lambda: _codes(opened()[0], seen(), workers),
        "faulty_weights": lambda: _faulty_weights(*opened(), checked.problems),
    }
    for key, read in parts.items():
        try:
            document[key] = read()
        except MoequantError as error:
            # What is damaged was found by a check, and is why this cannot be read.
            if not checked.problem_count:
                raise
            document[key] = None
            document["not_read"][key] = str(error)
    return document


def sizes_of(checkpoint: Checkpoint, own: Sequence[Architecture]) -> Sizes:
    """`size_by_role` of a checkpoint, quantized or not.

    Args:
        checkpoint: an opened checkpoint.
        own: architectures that a user's file or a record describes.

    Raises:
        CheckpointError: as `read_source`.
        UnsupportedError: an unknown architecture or quantization.
    """
    found = read_source(checkpoint.tensors, source_config(checkpoint), own)
    return size_by_role(roles_in(checkpoint.tensors, found))


def _check_converted(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what neither config.json nor moequant.json says to be converted.

    In BF16 a converted checkpoint has no quantization_config, but moequant.json.
    """
    if quantization_config_of(config) is None and read_record_of(path) is None:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: no quantization_config, and no {RECORD_FILE} beside it; this "
            "is not a converted checkpoint. Convert it first: moequant convert SOURCE OUTPUT "
            "--format NAME"
        )


def _origin(path: Path, source: str | None) -> dict[str, Any] | None:
    record = read_record_of(path)
    return None if record is None else describe_origin(record, source=source, output=str(path))


def read_record_of(path: Path) -> Mapping[str, Any] | None:
    """The moequant.json in a directory, or None; raises CheckpointError if it is unreadable."""
    if not (path / RECORD_FILE).exists():
        return None
    return read_document(FixedFile.at(path / RECORD_FILE))


def _compatibility(
    checkpoint: Checkpoint, own: Sequence[Architecture], checked: Checked
) -> dict[str, Any]:
    """What `moequant check` says; where every byte was checked, by the scales of some layers."""
    layers = _LAYERS_OF_CHECKED if checked.verdict() in ("verified", "unchanged") else None
    return check_checkpoint(checkpoint, own, layers=layers).to_json()


def _codes(checkpoint: Checkpoint, found: SourceModel, workers: int) -> list[dict[str, Any]]:
    weights = [info for info in found.weights.values() if isinstance(info, EncodedInfo)]
    return count_codes(checkpoint, weights, found.model.roles, workers=workers)


def _faulty_weights(
    checkpoint: Checkpoint, own: Sequence[Architecture], problems: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Layer, expert and projection of the experts that problems name."""
    found = find_architecture(checkpoint.config, own, names=checkpoint.tensors)
    roles = dict.fromkeys(
        role
        for problem in problems
        if (role := _role_of_part(problem["name"], found)) and role.expert is not None
    )
    return [asdict(role) for role in roles]


def _role_of_part(name: str, architecture: Architecture) -> TensorRole | None:
    """The role of the weight that a tensor is a part of; None for what is no tensor."""
    try:
        return architecture.classify(f"{name.rpartition('.')[0]}.weight")
    except UnsupportedError:  # looks like an expert, but problems may name anything
        return None
