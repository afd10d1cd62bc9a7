"""Parts of a quantized weight, of some of its rows each, that can be read on their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.formats import get_format
from moequant.models.stacked import Place

if TYPE_CHECKING:
    from moequant.weights.encoded import EncodedInfo

TILE_ELEMENTS = 1 << 23
"""Of a weight: 16 MB in BF16."""


def split_rows(info: EncodedInfo) -> list[EncodedInfo]:
    """Tiles of equal size that make up a weight, of at most TILE_ELEMENTS where rows allow.

    Only the weight itself where it is no larger, lies in a tensor with others, or has a part that
    does not go with its rows.
    """
    N, K = info.shape
    block = get_format(info.format).block[0]
    blocks = N // block
    if N * K <= TILE_ELEMENTS or N % block or not all(map(_is_whole, info.places.values())):
        return [info]
    wanted = -(-N * K // TILE_ELEMENTS)
    count = next((n for n in range(wanted, blocks + 1) if blocks % n == 0), blocks)
    heights = {}
    for name, part in zip(info.places, info.parts, strict=True):
        rows = part.shape[0] if part.shape else 1
        if rows not in (N, blocks):
            return [info]
        heights[name] = rows // count
    return [
        replace(
            info,
            shape=(N // count, K),
            size_bytes=info.size_bytes // count,
            places={
                name: Place(tensor=place.tensor, expert=tile, height=heights[name])
                for name, place in info.places.items()
            },
        )
        for tile in range(count)
    ]


def _is_whole(place: Place) -> bool:
    return place == Place(tensor=place.tensor)
