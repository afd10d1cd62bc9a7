"""The folder of an unfinished calibration, beside the file of statistics that it will write.

STATS.unfinished/ contains:

    lock                 locked while a calibration runs
    settings.json        what decides the bytes: source, data, options, versions, threads
    progress.json        the last finished stage, and the digests of finished layers
    statistics           the file that becomes STATS at the end
    embedding.bin        what the embedding returned, with embedding.json beside it
    layer-N.bin          what the last finished layer returned, likewise

A stage is finished when progress.json says so, which is replaced as a whole after everything that
the stage wrote is on the disk. A stage that was killed is done again from its inputs.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from moequant.errors import MoequantError
from moequant.storage.disk import explained, fsync_directory, replace_file
from moequant.storage.lock import exclusive
from moequant.storage.setting_differences import difference
from moequant.streaming.activations import remove_activations

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

_SETTINGS, _PROGRESS = "settings.json", "progress.json"
EMBEDDING = -1
"""The stage before the first layer."""


class _Progress(BaseModel):
    """What progress.json says."""

    model_config = ConfigDict(extra="forbid", strict=True)
    finished: int
    digests: dict[str, str]


class WorkFolder:
    """The folder of one unfinished calibration.

    Attributes:
        path: the folder.
        target: the file that is to be written.
        finished: the last finished stage, a layer or EMBEDDING; None before that.
        digests: of finished layers, as `StatisticsRecord.digests`.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.unfinished")
        self.finished: int | None = None
        self.digests: dict[str, str] = {}

    @property
    def exists(self) -> bool:
        """Whether there is such a folder."""
        return self.path.exists()

    @property
    def statistics(self) -> Path:
        """The file that becomes the target."""
        return self.path / "statistics"

    def activations(self, stage: int) -> Path:
        """What a stage returned."""
        return self.path / ("embedding.bin" if stage == EMBEDDING else f"layer-{stage}.bin")

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder; raises MoequantError if another process holds the lock."""
        return exclusive(self.path, "calibration")

    def open(self, settings: dict[str, Any], *, overwrite: bool) -> None:
        """Continue what is there, or begin; within `lock`.

        Raises:
            MoequantError: what is there has other settings and `overwrite` is False, or it cannot
                be read or written.
        """
        before = self._read(_SETTINGS)
        if before == json.loads(_json(settings)):
            self._read_progress()
        elif before is None or overwrite:
            self.begin(settings)
        else:
            raise MoequantError(
                f"{self.path}: an unfinished calibration with other settings: "
                f"{difference(before, json.loads(_json(settings)))}. "
                "Finish it with those, or start over with --overwrite (overwrite=True)"
            )

    def begin(self, settings: dict[str, Any]) -> None:
        """Forget what is there, and begin; within `lock`."""
        self._clear()
        self.finished, self.digests = None, {}
        replace_file(self.path / _SETTINGS, _json(settings))

    def finish(self, stage: int, digests: dict[str, str]) -> None:
        """Record that a stage is finished, and remove what only it needed."""
        self.finished, self.digests = stage, {**self.digests, **digests}
        progress = {"finished": stage, "digests": self.digests}
        replace_file(self.path / _PROGRESS, _json(progress))
        if stage > EMBEDDING + 1:
            remove_activations(self.activations(stage - 1))

    def remove(self) -> None:
        """Remove the folder of a finished calibration; the lock goes with it."""
        with explained(self.path, "removed"):
            (self.path / _SETTINGS).unlink(missing_ok=True)
            shutil.rmtree(self.path)
        fsync_directory(self.path.parent)

    def _clear(self) -> None:
        with explained(self.path, "cleared"):
            # Settings last: a folder without them has nothing to continue.
            for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == _SETTINGS):
                if entry.name != "lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _read_progress(self) -> None:
        progress = self._read(_PROGRESS)
        if progress is None:
            return
        try:
            found = _Progress.model_validate(progress)
        except ValidationError:
            raise MoequantError(
                f"{self.path / _PROGRESS}: does not say what is finished; remove {self.path} to "
                "start over"
            ) from None
        self.finished, self.digests = found.finished, found.digests

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        if not path.exists():
            return None
        with explained(path, "read"):
            text = path.read_text("utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise MoequantError(f"{path}: no JSON object; remove {self.path} to start over")
        return found


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()
