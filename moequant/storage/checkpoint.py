"""A checkpoint on disk: its config, headers, and reads of its tensors.

The weight files are:

1. With `model.safetensors.index.json`, the files that it names. The index must agree with their
   headers. A `model.safetensors` that it does not name is refused, because transformers loads that
   file and engines load the shards.
2. Otherwise `model.safetensors` only, as for transformers.
3. Otherwise the only other *.safetensors file, or a complete set NAME-0000i-of-0000n.safetensors.
4. Anything else is refused: it could have a second copy under another name (Mistral's
   consolidated.safetensors) or lack a shard.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from reprlib import repr as show
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError, MoequantError, UnsupportedError
from moequant.storage.buffers import Arena, tensor_bytes
from moequant.storage.documents import read_document
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from moequant.storage.folder import PICKLES, Folder
from moequant.storage.headers import DTYPES, MAX_NAME, TensorInfo, read_header_and_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Buffer

    from moequant.storage.reader import FixedFile


_DIGITS = re.compile("[0-9]+")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRange:
    """The byte range of a tensor, or of rows of its first dimension, in a file.

    Attributes:
        file: the file.
        info: name of the tensor; dtype, shape and position of the range.
    """

    file: FixedFile
    info: TensorInfo


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk or on the hub. Opening reads only headers; reading is thread-safe.

    Attributes:
        folder: its files; of one on the hub, `path` has those that opening needed.
        config: the parsed config.json.
        tensors: every tensor, in natural order of names (layer 2 before layer 10).
        files: the weight files by name, in natural order, with their state when they were opened.
        config_file: config.json with its state when it was read; None if it is unreadable.
        index_file: the index with its state when it was read; None where there is none.
    """

    folder: Folder
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    config_file: FixedFile | None = None
    index_file: FixedFile | None = None
    files: Mapping[str, FixedFile] = field(repr=False)

    @classmethod
    def open(cls, folder: Path | Folder) -> Checkpoint:
        """Read config, index and headers of the checkpoint in a directory.

        Raises:
            CheckpointError: there is no such directory, a file is missing, malformed or
                inconsistent with another, or the directory is the output of an unfinished
                conversion.
            UnsupportedError: the weights are in pickle files.
        """
        if not isinstance(folder, Folder):
            _check_directory(folder)
            folder = Folder(path=folder)
        folder.check()
        config_file = folder.open(CONFIG_FILE)
        config = read_document(config_file)
        index_file, weight_map, names = _choose_files(folder)
        # Before reading the headers, so that later reads detect any change.
        files = folder.open_weights(names)
        tensors = _read_tensors(folder.shown, files)
        if weight_map is not None:
            _check_index(folder.shown / INDEX_FILE, weight_map, tensors)
        if not tensors:
            raise CheckpointError(f"{folder.shown}: {', '.join(files)}: no tensors; fetch it again")
        return cls(
            folder=folder,
            config=config,
            tensors=tensors,
            config_file=config_file,
            index_file=index_file,
            files=files,
        )

    @classmethod
    def open_known(cls, path: Path, state: Mapping[str, Sequence[int]]) -> Checkpoint:
        """As `open`, for a checkpoint that was opened before: headers wait until they are wanted.

        The headers of a model with many experts take as long to read as some layers of weights.

        Args:
            path: its directory.
            state: `file_state` of then. If it is another now, or if there are other weight files
                beside them, which `open` might choose, this is `open`.

        Raises:
            CheckpointError: as `open`; what is wrong with headers, once `tensors` is looked at.
            UnsupportedError: as `open`.
        """
        folder = Folder(path=path)
        folder.check()
        if {name for name in folder.names() if _may_count(name)} != state.keys():
            return cls.open(folder)
        files = {name: folder.open(name) for name in state}
        config_file = folder.open(CONFIG_FILE)
        known = cls(
            folder=folder,
            config=read_document(config_file),
            config_file=config_file,
            index_file=files.pop(INDEX_FILE, None),
            files=files,
            tensors=_TensorsOnDemand(folder.shown, files),
        )
        return known if known.file_state() == state else cls.open(folder)

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.folder.path

    @property
    def is_local(self) -> bool:
        """Whether all weights are on a disk of this machine; else reads of them are requests."""
        return all(file.is_local for file in self.files.values())

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size of each weight file, in natural order of names."""
        return {name: file.size_bytes for name, file in self.files.items()}

    def file_state(self) -> dict[str, list[int]]:
        """Size and modification time (ns) of each weight file, and of the index where there is one.

        JSON preserves its form.
        """
        files = dict(self.files)
        if self.index_file is not None:
            files[INDEX_FILE] = self.index_file
        return {name: [file.size_bytes, file.mtime_ns] for name, file in files.items()}

    def info(self, name: str) -> TensorInfo:
        """The header's entry of tensor `name`; raises CheckpointError if there is none."""
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.folder.shown}: no tensor {name!r}; fetch the checkpoint again"
            )
        return self.tensors[name]

    def locate(self, name: str, rows: slice | None = None) -> TensorRange:
        """The byte range of a tensor, or of `rows` of its first dimension; raises as `read`."""
        info = self.info(name)
        if info.dtype not in DTYPES:
            raise UnsupportedError(
                f"{name}: dtype {info.dtype} can be copied but not read; torch has no such dtype"
            )
        info = info if rows is None else _part(info, rows)
        return TensorRange(file=self.files[info.file], info=info)

    def read(self, name: str, rows: slice | None = None, arena: Arena | None = None) -> Tensor:
        """Read a tensor, or `rows` of its first dimension, into CPU memory.

        The memory is from `arena`, if given; only a contiguous range of `rows` is read.

        Raises:
            CheckpointError: no such tensor, or its file is unreadable or has changed.
            UnsupportedError: torch has no such dtype.
            IndexError: `rows` has a step or is out of range.
        """
        return self.read_all([(name, rows)], arena)[0]

    def read_all(
        self,
        ranges: Sequence[tuple[str, slice | None]],
        arena: Arena | None = None,
        *,
        gap_bytes: int = 0,
    ) -> list[Tensor]:
        """As `read` for each; ranges that follow one another in a file are read in one call.

        Args:
            ranges: names of tensors and rows, as of `read`.
            arena: as of `read`.
            gap_bytes: read up to this many bytes between two ranges rather than read twice: of a
                file on the hub, each call is a request.
        """
        arena = arena or Arena()
        found: list[Tensor] = []
        runs: list[tuple[TensorRange, list[memoryview]]] = []
        end: tuple[str, int] | None = None
        for name, rows in ranges:
            where = self.locate(name, rows)
            info = where.info
            found.append(arena.empty(info.shape, dtype=DTYPES[info.dtype]))
            gap = info.start - end[1] if end is not None and end[0] == info.file else -1
            if not 0 <= gap <= gap_bytes:
                runs.append((where, []))
            elif gap:
                runs[-1][1].append(memoryview(bytearray(gap)))
            runs[-1][1].append(tensor_bytes(found[-1]))
            end = info.file, info.stop
        for first, buffers in runs:
            first.file.read_into(first.info.start, *buffers)
        return found

    def read_into(self, name: str, offset_bytes: int, buffer: Buffer) -> None:
        """Fill `buffer`, writable bytes, with a tensor's bytes from `offset_bytes`.

        Raises as `read`; IndexError if the range is outside the tensor.
        """
        info = self.info(name)
        view = memoryview(buffer).cast("B")
        stop = offset_bytes + view.nbytes
        if offset_bytes < 0 or stop > info.size_bytes:
            raise IndexError(f"{name}: bytes {offset_bytes} to {stop} of {info.size_bytes}")
        self.files[info.file].read_into(info.start + offset_bytes, view)

    def chunks(self, name: str, chunk_bytes: int) -> Iterator[memoryview]:
        """A tensor's bytes in chunks of at most `chunk_bytes`; each is valid until the next."""
        info = self.info(name)
        return self.files[info.file].chunks(info.start, info.stop, chunk_bytes)

    @contextmanager
    def naming_config(self) -> Iterator[None]:
        """Give errors about config.json its folder, since a command may read several."""
        try:
            yield
        except MoequantError as error:
            if not str(error).startswith(f"{CONFIG_FILE}: "):
                raise
            raise type(error)(f"{self.folder.shown}/{error}") from error

    def stop_waiting(self) -> None:
        """End reads that wait for a file to be fetched, with an error; later ones, too."""
        for file in self.files.values():
            file.stop_waiting()

    def left_out(self) -> list[Path]:
        """Weight files, relative to `path`, that are not read: other formats, adapters."""
        return [name for name in self.folder.weight_files() if str(name) not in self.files]


def natural_key(name: str) -> tuple[str, str]:
    """Sort key with digits as numbers; the name itself breaks ties such as 07 and 7."""
    return _DIGITS.sub(_sortable, name), name


def _sortable(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    # Length before digits orders as int() would, which refuses very long numbers; before it, what
    # is less than any letter. One text, since a tuple takes a hundred times the memory of a name.
    return f"\0{chr(min(len(number), sys.maxunicode))}{number}"


class _TensorsOnDemand(Mapping[str, "TensorInfo"]):
    """The tensors of files, whose headers are read when one is asked for."""

    def __init__(self, path: Path, files: Mapping[str, FixedFile]) -> None:
        self._path = path
        self._files = files

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        return _read_tensors(self._path, self._files)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _check_directory(path: Path) -> None:
    """Refuse a path at which there is nothing, or a file; what else is wrong, reading says."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        what = "no such directory"
    except (OSError, ValueError):
        return
    else:
        if S_ISDIR(found.st_mode):
            return
        what = "is no directory"
    raise CheckpointError(f"{path}: {what}; give the directory that holds {CONFIG_FILE}")


def _choose_files(
    folder: Folder,
) -> tuple[FixedFile | None, dict[str, str] | None, list[str]]:
    """The index and its map, if there is one, and the weight files in natural order."""
    path, names = folder.shown, folder.names()
    if INDEX_FILE in names:
        index_file = folder.open(INDEX_FILE)
        weight_map = _read_weight_map(index_file)
        files = sorted(set(weight_map.values()), key=natural_key)
        if SINGLE_FILE in names and SINGLE_FILE not in files:
            more = f" and {len(files) - 1} more" if files[1:] else ""
            raise CheckpointError(
                f"{path}: holds both {SINGLE_FILE}, which transformers loads, and {INDEX_FILE} "
                f"with {files[0]}{more}, which engines load; move away the one "
                "that is not to be read"
            )
        _check_all_there(folder, names, weight_map, files)
        return index_file, weight_map, files
    if SINGLE_FILE in names:
        return None, None, [SINGLE_FILE]
    files = sorted(filter(_is_weight_file, names), key=natural_key)
    if not files:
        raise _no_weights(folder, names)
    if not _is_whole(files):
        raise CheckpointError(
            f"{path}: no {INDEX_FILE} says which of {', '.join(files)} are the weights, and they "
            "are no complete set NAME-0000i-of-0000n; fetch the index and the missing files, or "
            "move away what does not belong"
        )
    return None, None, files


def _is_weight_file(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(".")


def _may_count(name: str) -> bool:
    """Whether a file of this name may decide which tensors a checkpoint has."""
    return name == INDEX_FILE or _is_weight_file(name)


def _check_all_there(
    folder: Folder, names: Iterable[str], weight_map: dict[str, str], files: Sequence[str]
) -> None:
    there = set(names)
    missing = [file for file in files if file not in there]
    if missing:
        tensor = min((n for n, f in weight_map.items() if f == missing[0]), key=natural_key)
        raise CheckpointError(
            f"{folder.shown / missing[0]}: missing, but {INDEX_FILE} says that it holds "
            f"{tensor!r}; files missing: {len(missing)} of {len(files)}. {folder.absent}"
        )


def _no_weights(folder: Folder, names: Iterable[str]) -> CheckpointError | UnsupportedError:
    path = folder.shown
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        return UnsupportedError(
            f"{path}: weights in {pickles[0]}, but only safetensors are read, since unpickling "
            "runs code; save them again with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return CheckpointError(f"{path}: no *.safetensors file; {folder.without_weights}")


def _is_whole(files: list[str]) -> bool:
    """Whether sorted `files` are one file without a number, or all of one numbered set."""
    matches = [_NUMBERED.fullmatch(file) for file in files]
    if len(files) == 1 and matches[0] is None:
        return True
    found = [match.groups() for match in matches if match]
    stem, _, count = found[0] if found else ("", "", "0")
    return found == [(stem, f"{i:05}", count) for i in range(1, int(count) + 1)] and all(matches)


def _read_weight_map(index: FixedFile) -> dict[str, str]:
    path, weight_map = index.path, read_document(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map of files by tensor; fetch it again")
    for name, file in weight_map.items():
        # A plain name: an index shall not make us read, or convert, what lies elsewhere.
        if (
            not isinstance(file, str)
            or not file.isprintable()
            or not file.endswith(".safetensors")
            or "/" in file
            or "\\" in file
            or max(len(name), len(file)) > MAX_NAME
        ):
            raise CheckpointError(
                f"{path}: tensor {show(name)} in file {show(file)}, but the file must be "
                "the plain name of a .safetensors file next to the index, and each name at most "
                f"{MAX_NAME} characters long; fetch the index again"
            )
    return weight_map


def _read_tensors(path: Path, files: Mapping[str, FixedFile]) -> dict[str, TensorInfo]:
    """What the headers of all files say, in natural order of names."""
    tensors: dict[str, TensorInfo] = {}
    for file, opened in files.items():
        for name, info in read_header_and_metadata(opened, file)[0].items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: tensor {name!r} in {tensors[name].file} and in {file}, but must be "
                    "in one file; fetch the checkpoint again"
                )
            tensors[name] = info
    return {name: tensors[name] for name in sorted(tensors, key=natural_key)}


def _check_index(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    found = {name: info.file for name, info in tensors.items()}
    if found == weight_map:
        return
    names = weight_map.keys() | found.keys()
    name = min((n for n in names if weight_map.get(n) != found.get(n)), key=natural_key)
    raise CheckpointError(
        f"{path}: tensor {name!r} belongs in {weight_map.get(name, 'no file')}, but is in "
        f"{found.get(name, 'none of those named')}; fetch index and weights again"
    )


def _part(info: TensorInfo, rows: slice) -> TensorInfo:
    """The header entry of `rows` of a tensor."""
    if not info.shape:
        raise IndexError(f"{info.name}: a scalar has no rows")
    first = 0 if rows.start is None else rows.start
    last = info.shape[0] if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= first <= last <= info.shape[0]:
        raise IndexError(f"{info.name}: {rows} of {info.shape[0]} rows")
    row_bytes = info.size_bytes // max(info.shape[0], 1)
    return info._replace(
        shape=(last - first, *info.shape[1:]),
        start=info.start + first * row_bytes,
        stop=info.start + last * row_bytes,
    )
