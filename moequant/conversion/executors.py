"""Executors, which write the shards of a plan in this process or on a cluster.

The plan, the journal, the commit and the bytes are the same for all.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moequant.conversion.run import write_shards
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moequant.conversion.finished_shard import FinishedShard

    WriteShards = Callable[..., Iterator[FinishedShard]]
    """As `run.write_shards`: writes shards, and yields each once it is recorded."""

LOCAL = "local"
RAY = "ray"


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
