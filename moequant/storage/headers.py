"""Parse and check the header of an untrusted safetensors file.

A file is an 8-byte little-endian length, that many bytes of JSON, then the data. The JSON maps each
tensor to its dtype, shape and byte range in the data; the ranges cover the data without overlaps
and gaps. moequant has its own parser because it copies byte ranges, where a wrong offset would not
be noticed, and because errors must name the tensor.

Source: the format section of the safetensors README, and version 0.8 of the library for details
(dtype names, the 100 MB limit, padding).
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from reprlib import repr as show
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.storage.buffers import PAGE_BYTES
from moequant.storage.documents import MAX_BYTES, parse_object, show_name
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

LENGTH_BYTES = 8
MAX_HEADER_BYTES = MAX_BYTES
"""safetensors' limit; a larger header is refused without reading it."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""torch dtype by safetensors name, for dtypes with the same elements."""

# torch has no 6-bit dtypes, and its 4-bit dtype has pairs as elements. Such tensors can be copied,
# but not read.
DTYPE_BITS: dict[str, int] = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits per element by safetensors name, for every dtype of a checkpoint."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_NAME = 250
"""Maximum length of a tensor's name; real names have about a hundred characters."""
_INT64_MAX = 2**63 - 1
_MAX_DIMS = 64
_FIELDS = {"dtype", "shape", "data_offsets"}
_REMEDY = "fetch the file again, or save it again with safetensors"
# By the specification of Git LFS, a pointer begins so and has fewer than 1024 bytes.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_LFS_POINTER = 1024


class TensorInfo(NamedTuple):
    """What a header says of one tensor.

    Attributes:
        name: full name.
        dtype: safetensors name, a key of DTYPE_BITS.
        shape: extents, in elements.
        file: name of its file, relative to the checkpoint; empty for a file that is being written.
        start: offset of the first byte in the file.
        stop: offset after the last byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return self.stop - self.start


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of `dtype`; raises UnsupportedError if there is none."""
    if dtype not in _NAMES:
        raise UnsupportedError(f"{dtype}: not supported by safetensors; use {', '.join(DTYPES)}")
    return _NAMES[dtype]


@lru_cache(maxsize=1 << 10)
def bit_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bits; a multiple of 8 in every valid file."""
    # Cached, because the tensors of a checkpoint have few distinct shapes.
    return DTYPE_BITS[dtype] * math.prod(shape)


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """Read and check the header of the safetensors file at `path`, in the order it lists tensors.

    `file` is its name for `TensorInfo.file`. Raises CheckpointError for invalid safetensors.
    """
    return read_header_and_metadata(FixedFile.at(path), file)[0]


def read_header_and_metadata(
    source: FixedFile, file: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """As `read_header`, and the texts under `__metadata__` by name."""
    path = source.path
    data_start = LENGTH_BYTES + _header_length(source)
    header = _read_object(source, data_start)
    metadata = header.pop("__metadata__", {})
    _check_metadata(path, metadata)
    infos = {
        name: _tensor_info(path, file, name, entry, data_start) for name, entry in header.items()
    }
    _check_coverage(path, infos.values(), data_start, source.size_bytes)
    return infos, metadata


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes before the data: length and JSON, padded with spaces to a whole page.

    The padding page-aligns the data, for loaders that map the file and for direct writes.

    Args:
        tensors: name, safetensors dtype, shape, and offsets of the first byte and after the last,
            relative to the data.
        metadata: texts to keep under `__metadata__`, besides the format.

    Raises:
        UnsupportedError: the header would exceed safetensors' limit.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for name, dtype, shape, start, stop in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % PAGE_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{len(header) - 1} tensors need a header of {len(text)} bytes, but safetensors reads "
            f"at most {MAX_HEADER_BYTES}; choose a smaller --max-shard-size"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _refusal(path: Path, fault: str, tensor: str | None = None) -> CheckpointError:
    where = f"{path}: " if tensor is None else f"{path}: tensor {show_name(tensor)}: "
    return CheckpointError(f"{where}{fault}; {_REMEDY}")


def _header_length(source: FixedFile) -> int:
    if source.size_bytes < LENGTH_BYTES:
        raise _refusal(
            source.path,
            f"{source.size_bytes} bytes, but a safetensors file begins with {LENGTH_BYTES} bytes "
            "with the length of its header",
        )
    start = bytes(source.read(0, LENGTH_BYTES))
    if _LFS_POINTER.startswith(start) and source.size_bytes < _LARGEST_LFS_POINTER:
        raise CheckpointError(
            f"{source.path}: a Git LFS pointer of {source.size_bytes} bytes, not the weights, "
            "which a clone without git-lfs leaves on the server; run `git lfs pull` in its folder, "
            "or fetch the file again"
        )
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise _refusal(
            source.path, f"header of {length} bytes, but at most {MAX_HEADER_BYTES} are allowed"
        )
    if length > source.size_bytes - LENGTH_BYTES:
        raise _refusal(
            source.path,
            f"cut off: its header alone ends at byte {length + LENGTH_BYTES}, but it has "
            f"{source.size_bytes} bytes",
        )
    return length


def _read_object(source: FixedFile, data_start: int) -> dict[str, Any]:
    text = source.read(LENGTH_BYTES, data_start)
    if not text.startswith(b"{"):
        raise _refusal(source.path, f"header begins with {show(bytes(text[:8]))}, expected {{")
    return parse_object(text, source.path)


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _refusal(path, f"__metadata__ is {show(metadata)}, expected strings by name")
    try:
        "".join(chain.from_iterable(metadata.items())).encode()
    except UnicodeEncodeError as error:
        # JSON can spell it, but it is no text, and other readers refuse the file.
        half = show(error.object[error.start])
        raise _refusal(
            path, f"__metadata__ holds {half}, half of a surrogate pair; expected text"
        ) from error


def _tensor_info(path: Path, file: str, name: str, entry: object, data_start: int) -> TensorInfo:
    # isprintable is False for control characters and for the lone surrogates JSON can spell.
    if not name or not name.isprintable():
        raise _refusal(path, "the name must be printable and not empty", name)
    if len(name) > MAX_NAME:
        raise _refusal(
            path, f"the name has {len(name)} characters, but at most {MAX_NAME} are read", name
        )
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _refusal(path, f"{show(entry)}, expected {sorted(_FIELDS)}", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _refusal(path, f"dtype {show(dtype)}, not one of {', '.join(DTYPE_BITS)}", name)
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise _refusal(
            path, f"shape {show(shape)}, expected at most {_MAX_DIMS} integers >= 0", name
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _refusal(path, f"data_offsets {show(offsets)}, expected [start, stop >= start]", name)
    start, stop = offsets
    extents = tuple(shape)
    bits = bit_count(dtype, extents)
    # Zeros are left out: torch computes strides of the other extents even if there is no element.
    largest = bits or bit_count(dtype, tuple(max(extent, 1) for extent in extents))
    if largest > _INT64_MAX:
        raise _refusal(path, f"shape {show(shape)} overflows 64 bits", name)
    if bits != 8 * (stop - start):
        raise _refusal(
            path, f"{stop - start} bytes, but {dtype} {shape} takes {bits / 8:.15g}", name
        )
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=extents,
        file=file,
        start=data_start + start,
        stop=data_start + stop,
    )


def _are_counts(values: object) -> bool:
    """Whether `values` is a list of integers that fit 64 bits; JSON's true is no integer."""
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110 - half the time of all()
        if type(value) is not int or not 0 <= value <= _INT64_MAX:
            return False
    return True


def _check_coverage(
    path: Path, infos: Iterable[TensorInfo], data_start: int, file_size: int
) -> None:
    """Check that ranges do not overlap, leave no gaps, and end where the file ends."""
    position, gap = data_start, None
    for info in sorted(infos, key=attrgetter("start", "stop")):
        if info.start != position:
            fault = "overlaps the tensor before it" if info.start < position else "leaves a gap"
            refusal = _refusal(
                path,
                f"{fault}: begins at data offset {info.start - data_start}, "
                f"expected {position - data_start}",
                info.name,
            )
            # A tensor that lies over others also leaves a gap where it should be.
            if info.start < position:
                raise refusal
            gap = gap or refusal
        position = info.stop
    if gap is not None:
        raise gap
    if position > file_size:
        raise _refusal(
            path,
            f"truncated: {file_size} bytes, but by its header it has {position}; "
            f"{position - file_size} bytes are missing",
        )
    if position < file_size:
        raise _refusal(
            path,
            f"{file_size} bytes, but its tensors end at {position}; "
            f"{file_size - position} bytes are unaccounted for",
        )
