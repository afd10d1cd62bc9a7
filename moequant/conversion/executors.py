"""Executors, which write the shards of a plan in this process or on a cluster.

The plan, the journal, the commit and the bytes are the same for all.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from moequant.conversion.run import write_shards
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moequant.conversion.journal import FinishedShard, Journal
    from moequant.conversion.plan import Plan
    from moequant.conversion.shards import PlannedShard
    from moequant.progress import Progress
    from moequant.quantizers import Choice
    from moequant.storage.checkpoint import Checkpoint

LOCAL = "local"
RAY = "ray"


class WriteShards(Protocol):
    """Writes shards and records each; see `run.write_shards`."""

    def __call__(
        self,
        source: Checkpoint,
        plan: Plan,
        shards: Sequence[PlannedShard],
        journal: Journal,
        *,
        choice: Choice,
        workers: int,
        progress: Progress,
    ) -> Iterator[FinishedShard]:
        """Yield each shard once it is recorded."""


def choose_executor(text: str) -> WriteShards:
    """The executor for "local", "ray" or "ray:ADDRESS".

    Raises:
        UnsupportedError: an unknown executor, or Ray is not installed.
    """
    name, colon, address = text.partition(":")
    if text == LOCAL:
        return write_shards
    if name != RAY or (colon and not address):
        raise UnsupportedError(
            f"executor {text!r}, but must be {LOCAL}, {RAY} or {RAY}:ADDRESS, such as "
            f"{RAY}:10.0.0.1:6379 or {RAY}:auto"
        )
    try:
        from moequant.conversion.cluster import write_shards_on_ray
    except ImportError as error:
        raise UnsupportedError(
            f"executor {text!r}: Ray cannot be imported here ({error}); install it with "
            "pip install 'moequant[ray]'"
        ) from error
    return partial(write_shards_on_ray, address=address or None)
