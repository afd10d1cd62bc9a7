"""A checkpoint on the Hugging Face hub, of which only headers and small documents are fetched."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError, UnreachableError
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.disk import existing_parent
from moequant.storage.files import (
    CONFIG_FILE,
    HF_QUANT_CONFIG_FILE,
    INDEX_FILE,
    PREPARED_FOLDER,
    QUANT_CFG_FILE,
    RECORD_FILE,
)
from moequant.storage.folder import (
    INNER_NAME_RULE,
    PICKLES,
    Folder,
    is_inner_name,
    is_left_out,
    is_weights,
)
from moequant.storage.headers import LENGTH_BYTES, MAX_HEADER_BYTES
from moequant.storage.hub import (
    HubRepository,
    RangedFile,
    is_unavailable,
    not_reached,
    ranged_file,
)
from moequant.storage.locate import directory_of, is_offline, locate_in_cache
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_DOCUMENTS = (CONFIG_FILE, INDEX_FILE, HF_QUANT_CONFIG_FILE, QUANT_CFG_FILE, RECORD_FILE)
"""What describes the weights; it is fetched into the hub's cache."""
_HEAD_BYTES = 1 << 17
"""What is fetched of a weight file at first: more than most headers have."""

_HEADERS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Download:
    """What it takes to have all files of a repository here.

    Attributes:
        repository: the repository.
        size_bytes: size of all files that are downloaded to convert it.
        cached_bytes: size of those that the hub's cache already has.
        cache: the hub's cache.
        free_bytes: free space there.
    """

    repository: HubRepository
    size_bytes: int
    cached_bytes: int
    cache: Path
    free_bytes: int

    @property
    def left_bytes(self) -> int:
        """What is still to be downloaded."""
        return self.size_bytes - self.cached_bytes


@dataclass(frozen=True, kw_only=True)
class HubFolder(Folder):
    """The files of a repository; `path` is its folder in the hub's cache, which lacks most.

    Attributes:
        repository: the repository.
    """

    repository: HubRepository

    @classmethod
    def of(cls, repository: HubRepository) -> HubFolder:
        """The folder of a repository, with the documents that describe it fetched.

        Raises:
            CheckpointError: no access, or no config.json.
        """
        if CONFIG_FILE not in repository.files:
            raise CheckpointError(
                f"{repository.repo_id}: no {CONFIG_FILE} at commit {repository.commit:.12}, so it "
                "is no model that transformers loads; give another repository or --revision"
            )
        paths = [repository.fetch(file) for file in _DOCUMENTS if file in repository.files]
        return cls(path=paths[0].parent, repository=repository)

    @property
    def shown(self) -> Path:
        """How messages call it: by the repository's id."""
        return Path(self.repository.repo_id)

    @property
    def absent(self) -> str:
        """What messages advise about a file that is not in the repository."""
        return (
            f"The repository lacks it at commit {self.repository.commit:.12}; give another "
            "--revision, or tell its owner"
        )

    @property
    def without_weights(self) -> str:
        """What messages advise if the repository has no weight file."""
        return "give the repository of the release in safetensors"

    def check(self) -> None:
        """Do nothing: a repository is no output of ours that is being written."""

    def names(self) -> list[str]:
        """Names of files that may be its weights, or describe them."""
        repository = self.repository
        pickles = (file for file in repository.files if file.endswith(PICKLES))
        return sorted(file for file in {*repository.downloaded, *pickles} if "/" not in file)

    def open(self, file: str) -> FixedFile:
        """A file of the repository: in the hub's cache, or fetched by ranges."""
        cached = self.repository.cached(file)
        return ranged_file(self.repository, file) if cached is None else FixedFile.at(cached)

    def open_weights(self, files: Iterable[str]) -> Mapping[str, FixedFile]:
        """Weight files with their headers fetched, except those in the hub's cache."""
        opened = {file: self.open(file) for file in files}
        with ThreadPoolExecutor(_HEADERS_AT_ONCE, "moequant-headers") as pool:
            return dict(zip(opened, pool.map(_with_header, opened.values()), strict=True))

    def sidecar_files(self) -> list[Path]:
        """As the function of this name, of what will be downloaded."""
        files = [file for file in self._shown_files() if not is_weights(file)]
        for file in files:
            if not is_inner_name(str(file)):
                raise CheckpointError(
                    f"{self.shown}: holds {str(file)!r}, but names must {INNER_NAME_RULE}; give a "
                    "repository without such a file"
                )
        return [Path(file) for file in files]

    def weight_files(self) -> list[Path]:
        """As the function of this name, of what will be downloaded."""
        return [Path(file) for file in self._shown_files() if is_weights(file)]

    def _shown_files(self) -> list[PurePosixPath]:
        files = map(PurePosixPath, self.repository.downloaded)
        return [
            file
            for file in files
            if not any(is_left_out(part) for part in (file, *file.parents))
            and file.parts[0] != PREPARED_FOLDER
        ]

    def fetch(self, files: Iterable[Path]) -> None:
        """Fetch small files into the hub's cache, and note the revision there.

        Raises:
            CheckpointError: as `HubRepository.fetch`.
        """
        with ThreadPoolExecutor(_HEADERS_AT_ONCE, "moequant-fetch") as pool:
            for _ in pool.map(self.repository.fetch, map(str, files)):
                pass
        self.repository.note_revision()

    def state(self, files: Iterable[str]) -> dict[str, list[Any]]:
        """Size of each file, and the hub's name of its content."""
        found = {file: self.repository.files[file] for file in files}
        return {name: [file.size_bytes, file.blob_id] for name, file in found.items()}

    def download(self, weights: Iterable[str]) -> Download:
        """What is left to download of these weight files and all small files."""
        repository = self.repository
        documents = repository.files.keys() & set(_DOCUMENTS)
        files = {*weights, *documents, *map(str, self.sidecar_files())}
        sizes = {file: repository.files[file].size_bytes for file in files}
        cached = sum(size for file, size in sizes.items() if repository.cached(file) is not None)
        cache = repository.snapshot.parents[2]
        there = existing_parent(cache)
        return Download(
            repository=repository,
            size_bytes=sum(sizes.values()),
            cached_bytes=cached,
            cache=cache,
            free_bytes=shutil.disk_usage(there).free,
        )


def open_headers(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint without its weights: of a hub repository, fetch only what describes them.

    Without network, or with HF_HUB_OFFLINE, a repository is opened as it is in the hub's cache.

    Args:
        source: as for `locate`.
        revision: as for `locate`.

    Raises:
        ArgumentError: as `locate`.
        CheckpointError: as `locate` and `Checkpoint.open`; or the repository changed meanwhile.
        UnsupportedError: the weights are in pickle files.
    """
    path = directory_of(source, revision)
    if path is not None:
        return Checkpoint.open(path)
    repo_id = str(source)
    if is_offline():
        return Checkpoint.open(locate_in_cache(repo_id, revision))
    try:
        repository = HubRepository.find(repo_id, revision)
    except CheckpointError as error:
        # As huggingface_hub's downloads: no network or no access is no hindrance to what is here.
        if not is_unavailable(error):
            raise
        with suppress(CheckpointError):
            return Checkpoint.open(locate_in_cache(repo_id, revision))
        if isinstance(error, UnreachableError):
            raise UnreachableError(f"{repo_id}: {not_reached(repo_id, revision)}") from error
        raise
    return Checkpoint.open(HubFolder.of(repository))


def download_of(checkpoint: Checkpoint) -> Download | None:
    """What is left to download of a checkpoint on the hub; None for one in a directory."""
    folder = checkpoint.folder
    return folder.download(checkpoint.files) if isinstance(folder, HubFolder) else None


def check_cache_space(download: Download) -> None:
    """Check that the hub's cache has room for what is left; raises CheckpointError."""
    if download.free_bytes < download.left_bytes:
        raise CheckpointError(
            f"{download.cache}: {download.free_bytes:,} bytes free, but {download.left_bytes:,} of "
            f"{download.repository.repo_id} are still to be downloaded there; free space, set "
            "HF_HOME to a folder on another disk, or give --delete-source-shards"
        )


def _with_header(file: FixedFile) -> FixedFile:
    """A file on the hub with its header fetched; other files as they are."""
    if not isinstance(file, RangedFile):
        return file
    head = file.repository.read(file.name, 0, min(_HEAD_BYTES, file.size_bytes))
    stop = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little")
    # Reading such a header will say what is wrong with it.
    is_wrong = stop > min(file.size_bytes, LENGTH_BYTES + MAX_HEADER_BYTES)
    if stop > len(head) and not is_wrong:
        head += file.repository.read(file.name, len(head), stop)
    return replace(file, head=head if is_wrong else head[:stop])
