"""A repository on the Hugging Face hub: its files, and ranges of their bytes.

Requests go through huggingface_hub's client, with its retries, token and HF_ENDPOINT. A range is
asked of one commit, and the answer must be of a file with the size and the digest that the hub's
list gave. Otherwise the parts of two files could be read as one.
"""

from __future__ import annotations

import fnmatch
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError, UnreachableError
from moequant.storage.files import CONFIG_FILE
from moequant.storage.folder import OTHER_WEIGHTS
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from huggingface_hub.hf_api import RepoSibling

# Second copies of the weights: other frameworks', Meta's and Mistral's.
NOT_DOWNLOADED = [
    *(f"*{suffix}" for suffix in OTHER_WEIGHTS), "original/*", "consolidated*.safetensors",
]  # fmt: skip

_RETRIES = 4
_PART_BYTES = 1 << 20
_MAX_MESSAGE = 300
_HEX_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file of a repository.

    Attributes:
        size_bytes: its size; -1 if the hub does not say.
        sha256: its digest in hex; None for a file in git, which the hub has no SHA-256 of.
        blob_id: the hub's name of its content: the SHA-256, or for a file in git its hash there.
    """

    size_bytes: int
    sha256: str | None
    blob_id: str

    @classmethod
    def of(cls, found: RepoSibling) -> HubFile:
        """What `model_info` says of a file."""
        sha256 = found.lfs.sha256 if found.lfs else None
        blob_id = sha256 or found.blob_id or ""
        size_bytes = -1 if found.size is None else found.size
        return cls(size_bytes=size_bytes, sha256=sha256, blob_id=blob_id)


@dataclass(frozen=True, kw_only=True)
class HubRepository:
    """One commit of a repository.

    Attributes:
        repo_id: owner/name.
        revision: what the user asked for; None for the main branch.
        commit: full hash of its commit.
        files: every file, by its path in the repository.
    """

    repo_id: str
    revision: str | None
    commit: str
    files: Mapping[str, HubFile] = field(repr=False)

    @classmethod
    def find(cls, repo_id: str, revision: str | None) -> HubRepository:
        """Ask the hub for the commit and the files of a revision: one request.

        Raises:
            UnreachableError: the hub does not answer.
            CheckpointError: no such repository or revision, or no access.
        """
        from huggingface_hub import HfApi

        with explained(repo_id, revision):
            found = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        files = {one.rfilename: HubFile.of(one) for one in found.siblings or ()}
        unknown = next((name for name, file in files.items() if file.size_bytes < 0), None)
        if unknown is not None:
            raise CheckpointError(
                f"{repo_id}: the hub gives no size of {unknown}; check HF_ENDPOINT, or run "
                f"`hf download {repo_id}` and give the directory it prints"
            )
        assert found.sha is not None, "asked for one revision"
        return cls(repo_id=repo_id, revision=revision, commit=found.sha, files=files)

    @cached_property
    def downloaded(self) -> list[str]:
        """The files that are downloaded to convert the repository, sorted."""
        left_out = (fnmatch.filter(self.files, pattern) for pattern in NOT_DOWNLOADED)
        return sorted(self.files.keys() - set(chain.from_iterable(left_out)))

    @cached_property
    def snapshot(self) -> Path:
        """The folder of this commit in the hub's cache; it may not exist, or lack files."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.repo_id, repo_type="model")
        return Path(constants.HF_HUB_CACHE).expanduser() / folder / "snapshots" / self.commit

    def cached(self, file: str) -> Path | None:
        """Where the hub's cache holds a file of this commit; None if it does not."""
        path = self.snapshot / file
        whole = path.is_file() and path.stat().st_size == self.files[file].size_bytes
        return path if whole else None

    def fetch(self, file: str, folder: Path | None = None) -> Path:
        """Download a file into `folder`, or into the hub's cache unless it is there.

        A file in `folder` is a copy, which may be deleted, also of a file in the cache.

        Raises:
            CheckpointError: it cannot be fetched, or has another size; then it is removed.
        """
        from huggingface_hub import hf_hub_download

        if folder is None and (path := self.cached(file)) is not None:
            return path
        with explained(self.repo_id, self.revision):
            path = Path(hf_hub_download(self.repo_id, file, revision=self.commit, local_dir=folder))
        found, wanted = path.stat().st_size, self.files[file].size_bytes
        if found != wanted:
            # Of a commit, so this copy is damaged; it would be returned again.
            path.resolve().unlink()
            raise CheckpointError(
                f"{self.repo_id}/{file}: {found} bytes were downloaded, now or before, but the hub "
                f"says {wanted}; the damaged copy was removed: run the command again to fetch it "
                "again"
            )
        return path

    def note_revision(self) -> None:
        """Note in the hub's cache which commit the revision is, for use without network."""
        from huggingface_hub import hf_hub_download

        with explained(self.repo_id, self.revision):
            hf_hub_download(self.repo_id, CONFIG_FILE, revision=self.revision)

    def check_digest(self, file: str, path: Path, sha256: str) -> None:
        """Check the digest of a downloaded file; removes it and raises CheckpointError if wrong."""
        wanted = self.files[file].sha256
        if wanted is not None and sha256 != wanted:
            path.resolve().unlink()
            raise CheckpointError(
                f"{self.repo_id}/{file}: downloaded with SHA-256 {sha256}, but the hub says "
                f"{wanted}; the damaged copy was removed: run the command again to fetch it again"
            )

    def read(self, file: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` up to `stop`, without the rest of it.

        Raises:
            UnreachableError: the hub does not answer, also not after some retries.
            CheckpointError: no access, the file has changed, or something between does not answer
                range requests.
        """
        from huggingface_hub import hf_hub_url

        if start == stop:
            return b""
        with explained(self.repo_id, self.revision):
            url = hf_hub_url(self.repo_id, file, revision=self.commit)
            answers, content = _fetch_range(url, start, stop)
        self._check_same(file, answers)
        if content is None or len(content) != stop - start:
            sent = "the whole file" if content is None else f"{len(content)} bytes"
            raise CheckpointError(
                f"{self.repo_id}/{file}: asked for bytes {start} to {stop}, but the hub, or a "
                f"proxy or mirror before it, sent {sent}; check HF_ENDPOINT, or run "
                f"`hf download {self.repo_id}` and give the directory it prints"
            )
        return content

    def _check_same(self, file: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Check that the hub's answers are about the file that its list named."""
        wanted = self.files[file]
        for headers in answers:
            total = headers.get("Content-Range", "").rpartition("/")[2]
            if total.isdigit() and int(total) != wanted.size_bytes:
                raise self._changed(file, f"{wanted.size_bytes} bytes before, {total} now")
        # Of a large file, only the hub's own answer has the digest; a CDN has tags of its own.
        etags = (headers.get("X-Linked-Etag") or headers.get("ETag", "") for headers in answers)
        found = next(etags, "").removeprefix("W/").strip('"')
        if wanted.sha256 and _HEX_SHA256.fullmatch(found) and found != wanted.sha256:
            raise self._changed(file, f"SHA-256 {wanted.sha256} before, {found} now")

    def _changed(self, file: str, how: str) -> CheckpointError:
        return CheckpointError(
            f"{self.repo_id}/{file}: changed on the hub between two requests ({how}); run the "
            "command again"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RangedFile(FixedFile):
    """A file on the hub of which only ranges are fetched; `mtime_ns` is 0.

    Attributes:
        repository: where it is.
        name: its path there.
        head: its first bytes, already fetched.
    """

    repository: HubRepository = field(repr=False, compare=False)
    name: str
    head: bytes = field(default=b"", repr=False, compare=False)

    @property
    def is_local(self) -> bool:
        """Whether its bytes are on a disk of this machine: never."""
        return False

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill `buffers` in order from byte `start`: one request; raises as HubRepository.read."""
        data = memoryview(self._bytes(start, start + sum(buffer.nbytes for buffer in buffers)))
        done = 0
        for buffer in buffers:
            buffer[:] = data[done : done + buffer.nbytes]
            done += buffer.nbytes

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytearray:
        """The bytes of several ranges: one request for each; raises as HubRepository.read."""
        return bytearray().join(self._bytes(start, stop) for start, stop in ranges)

    def chunks(self, start: int, stop: int, chunk_bytes: int) -> Iterator[memoryview]:
        """As FixedFile.chunks: one request for each chunk."""
        for position in range(start, stop, chunk_bytes):
            yield memoryview(self._bytes(position, min(position + chunk_bytes, stop)))

    def _bytes(self, start: int, stop: int) -> bytes:
        if stop <= len(self.head):
            return self.head[start:stop]
        return self.repository.read(self.name, start, stop)


def ranged_file(repository: HubRepository, file: str, head: bytes = b"") -> RangedFile:
    """A file of a repository; see `RangedFile`."""
    return RangedFile(
        path=Path(repository.repo_id) / file,
        size_bytes=repository.files[file].size_bytes,
        mtime_ns=0,
        repository=repository,
        name=file,
        head=head,
    )


def _fetch_range(url: str, start: int, stop: int) -> tuple[list[Mapping[str, str]], bytes | None]:
    """Ask for a range of bytes, again where the connection breaks.

    Returns:
        The headers of all answers, those of redirections first; and the bytes, at most one more
        than asked for. None if the answer is no range: what ignores ranges sends the whole file,
        which may be larger than the memory, and is not read.

    Raises:
        Exception: what huggingface_hub raises.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented, all three
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    headers = {
        **build_hf_headers(),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    content, broken = bytearray(), None
    for attempt in range(_RETRIES + 1):
        with http_stream_backoff(
            "GET", url, max_retries=_RETRIES, headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:  # fmt: skip
            hf_raise_for_status(response)
            answers: list[Mapping[str, str]] = [
                answer.headers for answer in (*response.history, response)
            ]
            if response.status_code != 206 or "Content-Range" not in response.headers:
                return answers, None
            content.clear()
            # The context manager repeats requests, but not what goes wrong in here.
            try:
                for part in response.iter_bytes(_PART_BYTES):
                    content += part[: stop - start + 1 - len(content)]
                    if len(content) > stop - start:
                        break
                return answers, bytes(content)
            except Exception as error:
                broken = error
        if attempt == _RETRIES or not is_unreachable(broken):
            break
        time.sleep(2**attempt)
    assert broken is not None
    raise broken


@contextmanager
def explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a CheckpointError with the next step."""
    try:
        yield
    # The errors of its transports (requests, httpx, xet) have no common base class.
    except Exception as error:
        kind = UnreachableError if is_unreachable(error) else CheckpointError
        raise kind(f"{repo_id}: {_explain(error, repo_id, revision)}") from error


def is_unavailable(error: CheckpointError) -> bool:
    """Whether the hub did not answer or gave no access, so that its cache may serve instead.

    Other answers are about the repository, such as that it has no such revision.
    """
    from huggingface_hub import errors

    # Of a private repository, the hub says that there is none.
    no_access = (errors.GatedRepoError, errors.RepositoryNotFoundError)
    return isinstance(error, UnreachableError) or isinstance(error.__cause__, no_access)


def is_unreachable(error: Exception) -> bool:
    """Whether no answer came at all: not an answer with an error, nor a fault of this machine."""
    from huggingface_hub import errors

    no_answer = (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)
    transport = type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests")
    return isinstance(error, no_answer) or (
        transport and not isinstance(error, errors.HfHubHTTPError)
    )


def not_reached(repo_id: str, revision: str | None) -> str:
    """What messages say if neither the hub nor its cache gives a repository."""
    return (
        "no such directory, so it was looked up as a hub repository, but the hub cannot be "
        f"reached, and revision {revision or 'main'} is not (completely) in the hub cache. "
        "Check the name, connect (HF_HUB_OFFLINE unset), or run "
        f"`hf download {repo_id}` where there is a network"
    )


def _explain(error: Exception, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "neither a directory nor a hub repo id; write owner/name, or the path of a directory"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"its owner grants access on request; accept the terms on "
            f"https://huggingface.co/{repo_id}, then run `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "no such directory, and no such model on the hub for you; check the name, and run "
            "`hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {revision!r} on the hub; give a branch, a tag or a full commit hash"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return not_reached(repo_id, revision)
    if isinstance(error, errors.EntryNotFoundError):
        return "lacks a file that its list names; run the command again, or give another --revision"
    # Its messages have several lines, with addresses and headers.
    said = shorten(str(error), _MAX_MESSAGE, placeholder=" ...")
    return (
        f"cannot be fetched: {type(error).__name__}: {said}; run the same command again to fetch "
        "the missing files, or give a directory"
    )
