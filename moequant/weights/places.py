"""Which bytes lie at a place, and what of them belongs to the weight.

Of a tensor that stacks the experts of a layer only one expert is read at a time, in one contiguous
range of bytes; transposing and picking rows happens in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.models import Place
    from moequant.storage.buffers import Arena
    from moequant.storage.checkpoint import Checkpoint, TensorRange


def locate(checkpoint: Checkpoint, place: Place) -> TensorRange:
    """The bytes to read for what lies at `place`; errors as `read_places`."""
    return checkpoint.locate(place.tensor, _rows(checkpoint, place))


def read_places(
    checkpoint: Checkpoint, places: Sequence[Place], arena: Arena | None = None
) -> list[Tensor]:
    """Read what lies at each place, contiguous; what several of them share is read once.

    Into the memory of `arena`, if there is one.

    Raises:
        CheckpointError: as `Checkpoint.read`, or a tensor has not the extents it must have.
        UnsupportedError: as `Checkpoint.read`.
    """
    wanted = {(place.tensor, place.expert): _rows(checkpoint, place) for place in places}
    ranges = [(tensor, rows) for (tensor, _), rows in wanted.items()]
    found = dict(zip(wanted, checkpoint.read_all(ranges, arena), strict=True))
    return [pick(found[place.tensor, place.expert], place, arena) for place in places]


def pick(tensor: Tensor, place: Place, arena: Arena | None = None) -> Tensor:
    """What is at `place`, contiguous, of the bytes that `locate` found."""
    if place.expert is not None and place.height is None:
        tensor = tensor[0]
    if place.rows is not None:
        rows = slice(place.rows.start, place.rows.stop, place.rows.step)
        # Rows that lie as columns are picked before they are transposed, which takes half the time.
        tensor = tensor[:, rows].contiguous() if place.transposed else tensor[rows]
    if place.transposed:
        tensor = tensor.T
    if arena is None or tensor.is_contiguous():
        return tensor.contiguous()
    return arena.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _rows(checkpoint: Checkpoint, place: Place) -> slice | None:
    """What of its tensor's first dimension lies at `place`; None for all."""
    if place.expert is None:
        return None
    shape = checkpoint.info(place.tensor).shape
    if shape[: len(place.extents)] != place.extents:
        raise CheckpointError(
            f"{place.tensor}: shape {list(shape)}, but by config.json it begins with "
            f"{list(place.extents)}; fetch or convert the checkpoint again"
        )
    height = 1 if place.height is None else place.height
    return slice(place.expert * height, (place.expert + 1) * height)
