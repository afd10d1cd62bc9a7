"""Find a checkpoint: a directory, or a repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from moequant.errors import CheckpointError
from moequant.storage.files import CONFIG_FILE
from moequant.storage.folder import OTHER_WEIGHTS

# Second copies of the weights: other frameworks', Meta's and Mistral's.
_NOT_DOWNLOADED = [
    *(f"*{suffix}" for suffix in OTHER_WEIGHTS), "original/*", "consolidated*.safetensors",
]  # fmt: skip


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint, downloaded from the hub if `source` is not a directory.

    Args:
        source: a directory, or a hub repo id "owner/name"; an existing directory has precedence. A
            Path, or a string that looks like one (begins with . / or ~, has two separators, or is
            a file), is never used as a repo id.
        revision: branch, tag or commit of a hub repo. The hub's environment variables
            (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN ...) apply.

    Raises:
        CheckpointError: no such directory or repo, no access, no network and not in the cache, or
            a revision for a directory.
    """
    try:
        path = Path(source).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    # The name is too long, a parent is not readable, or ~name is an unknown user.
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{source}: {reason}; give a directory or a hub repo id") from error
    if is_directory and str(source):  # Path("") is the current directory
        if revision is not None:
            raise CheckpointError(
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
    return _download(source, revision)


def _download(repo_id: str, revision: str | None) -> Path:
    # Imported here because it takes most of a second, and directories do not need it.
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                ignore_patterns=_NOT_DOWNLOADED,
                # Explicit, because a full commit hash is looked up on the hub even if offline.
                local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
            )
        )
    # The errors of its transports (requests, httpx, xet) have no common base class.
    except Exception as error:
        raise CheckpointError(f"{repo_id}: {_explain(error, repo_id, revision)}") from error


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
        return (
            "no such directory, so it was looked up as a hub repository, but the hub cannot be "
            f"reached, and revision {revision or 'main'} is not (completely) in the hub cache. "
            "Check the name, connect (HF_HUB_OFFLINE unset), or run "
            f"`hf download {repo_id}` where there is a network"
        )
    return (
        f"cannot be fetched: {type(error).__name__}: {error}; run the same command again to fetch "
        "the missing files, or give a directory"
    )
