"""Samples of source shards that are deleted before a conversion ends.

moequant.json has a digest of both ends of every tensor, in the order of their names, which is not
the order of the shards. So of each shard, these bytes are kept when it is fetched, with the shard's
SHA-256: 8 KiB per tensor, or the whole tensor if it is smaller, and then twice.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moequant.conversion.source_identity import sampled_ranges
from moequant.storage.disk import explained, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from moequant.storage.headers import TensorInfo
    from moequant.storage.reader import FixedFile

_DIGEST_BYTES = 64
_HEX = re.compile(b"[0-9a-f]{64}")


class ShardSample:
    """The sample of one shard, in a file; it is read once, in the order of `sampled_ranges`.

    Args:
        path: where the file is, or will be.
        infos: the shard's tensors, in natural order of names.
    """

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        self._path = path
        self._infos = infos
        self._position = _DIGEST_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        ranges = (pair for _, pairs in sampled_ranges(self._infos) for pair in pairs)
        return _DIGEST_BYTES + sum(stop - start for start, stop in ranges)

    @property
    def exists(self) -> bool:
        """Whether the file is there, and complete."""
        return self._path.is_file() and self._path.stat().st_size == self.size_bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the shard, in hex."""
        with explained(self._path, "read"), self._path.open("rb") as file:
            text = file.read(_DIGEST_BYTES)
        assert _HEX.fullmatch(text), self._path
        return text.decode()

    def write(self, shard: FixedFile, sha256: str) -> None:
        """Take the sample of a shard with this digest; the file is there completely or not."""
        with explained(self._path, "written"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, self._content(shard, sha256))

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        """The next ranges of `sampled_ranges`, as FixedFile.read_ranges of the shard gives them."""
        size_bytes = sum(stop - start for start, stop in ranges)
        with explained(self._path, "read"), self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read(size_bytes)
        self._position += size_bytes
        return data

    def _content(self, shard: FixedFile, sha256: str) -> Iterator[memoryview]:
        yield memoryview(sha256.encode())
        for _, ranges in sampled_ranges(self._infos):
            yield memoryview(shard.read_ranges(ranges))
