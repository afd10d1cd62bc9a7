"""The repository on the hub that a checkpoint is published in.

Every file is added by `HfApi.create_commit`, a few at a time, so that what was committed is not
sent again after an interruption, and of what was sent but not committed only the missing parts.
huggingface_hub's `upload_large_folder` does as much, but it is deprecated, keeps its notes in the
user's folder, and cannot leave config.json to the end.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from moequant._version import __version__
from moequant.errors import MoequantError, UnreachableError
from moequant.storage.hub import HubFile, is_unreachable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from huggingface_hub import HfApi

    from moequant.publishing.files import PublishedFile

_MAX_MESSAGE = 300
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A revision of a repository.

    Attributes:
        repo_id: owner/name.
        revision: a branch; None for the main one.
    """

    repo_id: str
    revision: str | None

    @property
    def url(self) -> str:
        """Its page on the hub."""
        from huggingface_hub import constants

        tree = "" if self.revision is None else f"/tree/{self.revision}"
        return f"{constants.ENDPOINT}/{self.repo_id}{tree}"

    def create(self, *, private: bool) -> None:
        """Create the repository and the branch, where they are missing.

        Args:
            private: of a new repository; else it is what the hub makes of it by default.

        Raises:
            UnreachableError: the hub does not answer.
            MoequantError: no token, or one that may not.
        """
        from huggingface_hub.errors import RevisionNotFoundError

        with self._explained():
            api = _api()
            # None leaves it to the default of the organization.
            api.create_repo(self.repo_id, private=private or None, exist_ok=True)
            if private:
                self._check_private(api)
            if self.revision is None:
                return
            try:
                api.model_info(self.repo_id, revision=self.revision)
            except RevisionNotFoundError:
                api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)

    def _check_private(self, api: HfApi) -> None:
        """Check that nobody else sees what is published; a repository may have been there."""
        if api.model_info(self.repo_id).private is False:
            raise MoequantError(
                "it exists and is public, and --private is only for a new one; make it private in "
                "its settings on the hub, give another REPO_ID, or leave --private out"
            )

    def files(self) -> dict[str, HubFile]:
        """Every file that is there; raises as `create`."""
        with self._explained():
            info = _api().model_info(self.repo_id, revision=self.revision, files_metadata=True)
        return {one.rfilename: HubFile.of(one) for one in info.siblings or ()}

    def commit(
        self, message: str, add: Iterable[PublishedFile] = (), delete: Iterable[str] = ()
    ) -> None:
        """Add and delete files in one commit.

        Raises:
            UnreachableError: the hub does not answer.
            MoequantError: no token, or one that may not; or the hub refuses a file.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in delete]
        with self._explained():
            operations += [
                CommitOperationAdd(
                    path_in_repo=file.name,
                    path_or_fileobj=file.content
                    if isinstance(file.content, bytes)
                    else str(file.content),
                )
                for file in add
            ]
            _api().create_commit(
                self.repo_id, operations, commit_message=message, revision=self.revision
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what huggingface_hub raises into an error with the next step."""
        try:
            yield
        except MoequantError as error:
            raise MoequantError(f"{self.repo_id}: {error}") from None
        # The errors of its transports (httpx, xet) have no common base class.
        except Exception as error:
            # What goes wrong in one of its threads comes as a RuntimeError.
            cause = error.__cause__ if isinstance(error, RuntimeError) else None
            found = cause if isinstance(cause, Exception) else error
            kind = UnreachableError if is_unreachable(found) else MoequantError
            raise kind(f"{self.repo_id}: {self._explain(found)}") from error

    def _explain(self, error: Exception) -> str:
        from huggingface_hub import errors

        status = getattr(getattr(error, "response", None), "status_code", None)
        owner = self.repo_id.partition("/")[0]
        if isinstance(error, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, but it is published over the network; unset it"
        if is_unreachable(error):
            return (
                "the hub cannot be reached; check the connection and HF_ENDPOINT, then run the "
                "same command again: what was sent is not sent again"
            )
        if isinstance(error, errors.GatedRepoError):
            return (
                "the repository is gated, and your account has no access to it; ask its owner for "
                "write access"
            )
        if status == _UNAUTHORIZED:
            return (
                "the hub takes no token, or another one, for this; run `hf auth login` with a "
                "token that may write, or set HF_TOKEN"
            )
        if status == _FORBIDDEN:
            return (
                f"the token may not write there; use a token with write access to {owner}, or "
                "give another REPO_ID"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return "no such repository for your token; check the name and the token's access"
        # Its messages have several lines, with addresses and headers.
        said = shorten(str(error), _MAX_MESSAGE, placeholder=" ...")
        return (
            f"not published: {type(error).__name__}: {said}; correct what it names, then run the "
            "same command again: what was sent is not sent again"
        )


def is_same(file: PublishedFile, there: Mapping[str, HubFile]) -> bool:
    """Whether the hub has a file with the same content, by SHA-256 or, of small files, by git."""
    found = there.get(file.name)
    if found is None or found.size_bytes != file.size_bytes:
        return False
    if found.sha256 is not None:
        return found.sha256 == file.sha256
    return found.blob_id == file.git_sha1


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="moequant", library_version=__version__)
