"""Pictures of small numbers as PNG, for heat maps with thousands of cells."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Color = tuple[int, int, int]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_INDEXED = 3


def png_uri(rows: Sequence[bytes], palette: Sequence[Color]) -> str:
    """A data URI of a picture, a byte a pixel before compression.

    Args:
        rows: the pixels of each row, as indices of the palette; all of one length, at least one.
        palette: at most 256 colors; the first is transparent.
    """
    assert rows
    assert len({len(row) for row in rows}) == 1
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, _INDEXED, 0, 0, 0)
    pixels = b"".join(b"\0" + row for row in rows)  # no filter
    data = b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", bytes(channel for color in palette for channel in color)),
            _chunk(b"tRNS", b"\0"),
            _chunk(b"IDAT", zlib.compress(pixels, 9)),
            _chunk(b"IEND", b""),
        )
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
