"""Find a checkpoint: a directory, or a repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from moequant.errors import ArgumentError, CheckpointError
from moequant.storage.files import CONFIG_FILE
from moequant.storage.given_path import path_text
from moequant.storage.hub import NOT_DOWNLOADED, explained


def locate(source: str | Path, revision: str | None = None, *, argument: str = "source") -> Path:
    """The directory of a checkpoint, downloaded from the hub if `source` is not a directory.

    Args:
        source: a directory, or a hub repo id "owner/name"; see `directory_of`.
        revision: branch, tag or commit of a hub repo. The hub's environment variables
            (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN ...) apply.
        argument: what the caller calls `source`, for messages.

    Raises:
        CheckpointError: no such directory or repo, no access, or no network and not in the cache.
        ArgumentError: a revision for a directory.
        UnsupportedError: `source` is neither a text nor a path.
    """
    found = directory_of(source, revision, argument=argument)
    return found or _download(str(source), revision, offline=is_offline())


def locate_in_cache(repo_id: str, revision: str | None = None) -> Path:
    """The directory of a hub repository in the hub's cache, without asking the hub.

    Raises:
        CheckpointError: it is not completely there.
    """
    return _download(repo_id, revision, offline=True)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def directory_of(
    source: str | Path, revision: str | None = None, *, argument: str = "source"
) -> Path | None:
    """`source` as a directory; None if it is to be looked up as a hub repo id.

    An existing directory has precedence. A Path, or a string that looks like one (begins with . /
    or ~, has two separators, or is a file), is never used as a repo id.

    Raises:
        CheckpointError: no such directory, and no repo id.
        ArgumentError: a revision for a directory.
        UnsupportedError: `source`, which `argument` is the name of, is neither a text nor a path.
    """
    path_text(argument, source, "a checkpoint's folder or the id of a hub repository")
    try:
        path = Path(source).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    # The name is too long, a parent is not readable, or ~name is an unknown user.
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{source}: {reason}; give a directory or a hub repo id") from error
    if is_directory and str(source):  # Path("") is the current directory
        if revision is not None:
            raise ArgumentError(
                f"{source}: a directory has no revision {revision!r}; leave the revision out or "
                "give a hub repo id that is no directory here"
            )
        return path
    reads_like_path = str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
    if isinstance(source, Path) or is_file or reads_like_path:
        raise CheckpointError(
            f"{source}: no such directory; give the directory that holds {CONFIG_FILE}"
            + ("" if isinstance(source, Path) else ", or a hub repo id such as owner/name")
        )
    return None


def _download(repo_id: str, revision: str | None, *, offline: bool) -> Path:
    # Imported here because it takes most of a second, and directories do not need it.
    import huggingface_hub

    with explained(repo_id, revision):
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                ignore_patterns=NOT_DOWNLOADED,
                # Explicit, because a full commit hash is looked up on the hub even if offline.
                local_files_only=offline,
            )
        )
