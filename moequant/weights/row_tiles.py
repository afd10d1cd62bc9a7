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

    Only the weight itself if it is no larger, lies in a tensor with others, or has a part that does
    not go with its rows.
    """
    N, K = info.shape
    block = get_format(info.format).block[0]
    blocks = N // block
    alone = all(place == Place(tensor=place.tensor) for place in info.places.values())
    rows = {part.name: part.shape[0] if part.shape else 1 for part in info.parts}
    if N * K <= TILE_ELEMENTS or N % block or not alone or not {*rows.values()} <= {N, blocks}:
        return [info]
    least = -(-N * K // TILE_ELEMENTS)
    count = next((n for n in range(least, blocks + 1) if blocks % n == 0), blocks)
    return [
        replace(
            info,
            shape=(N // count, K),
            size_bytes=info.size_bytes // count,
            places={
                name: replace(place, expert=tile, height=rows[place.tensor] // count)
                for name, place in info.places.items()
            },
        )
        for tile in range(count)
    ]
