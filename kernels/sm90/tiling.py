"""Which tiling a call of a size runs best with: by formula, or by what was measured.

Each kernel family has tables, JSON files of measurements on one GPU. Ours are in `tunings/`, a
user's in MOEQUANT_CACHE_DIR/tunings (default ~/.cache/moequant/tunings), and these win:

    {
     "format": "fp8_block", "kernel": 2, "gpu": "NVIDIA H200", "sms": 132,
     "shapes": [
      {"experts": 8, "hidden": 4096, "intermediate": 14336, "topk": 2,
       "tilings": [{"tokens": 1, "rows": 8, "split13": 2, "split2": 2, "pair": false,
                    "gather": false, "time_us": 93.1}]}
     ]
    }

`format` and `kernel` are name and version of the family that was measured: a table of another one
is passed over. `time_us` is for people. A call takes the tiling of the measured number of tokens
that is nearest by ratio, if at most NEAR apart; else, by the same rule, that of our table of
another GPU with the same number of SMs; else the formula's.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

from moequant.errors import MoequantError
from moequant.kernels.cubin_cache import cache_dir
from moequant.kernels.routing import likely_tile_rows
from moequant.kernels.shared_files import exclusive_lock, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NEAR = 1.5
"""A tiling holds for this many times fewer or more tokens than it was measured with."""

_SIZES = ("experts", "hidden", "intermediate", "topk")
_SPLITS = (1, 2, 4)
_SPLIT_ROWS = 32
"""Most rows whose sums of a split fit in shared memory."""
_OURS = Path(__file__).with_name("tunings")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tunable part of a call.

    Attributes:
        rows: most rows of a tile; the smaller the fewer wasted, the larger the fewer times weights
            are read.
        split13: CTAs along K of the first GEMM: 1, 2 or 4; 1 above 32 rows.
        split2: of the second.
        pair: whether two CTAs share the weights that two tiles of an expert need.
        gather: whether the first GEMM copies the tokens of its rows out of all of them, instead of
            reading a copy of each token for each of its experts.
    """

    rows: int
    split13: int = 1
    split2: int = 1
    pair: bool = False
    gather: bool = False


@dataclass(frozen=True, kw_only=True)
class TuningProblem:
    """What a tiling is for.

    Attributes:
        gpu: its name, as torch.cuda.get_device_name has it.
        sms: its multiprocessors.
        experts: E here.
        hidden: H.
        intermediate: I, as on disk.
        topk: T.
        tokens: M.
    """

    gpu: str
    sms: int
    experts: int
    hidden: int
    intermediate: int
    topk: int
    tokens: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those of the layer."""
        return tuple(getattr(self, size) for size in _SIZES)


class Tilings(ABC):
    """The tilings of a kernel family."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Rises when the kernels change so that old measurements mislead."""
    rows: ClassVar[tuple[int, ...]]
    """What `Tiling.rows` may be, ascending."""
    pair_rows: ClassVar[tuple[int, ...]]
    """Those that can be paired."""
    gather_rows: ClassVar[tuple[int, ...]]
    """Those that can be gathered."""
    rows_for_skew: ClassVar[int] = 0
    """The formula's tiles have at least so many rows, or as many as a quarter of the tokens fills:
    with skewed routing some experts have many more than the mean."""

    def _split(self, rows: int, rounds: float) -> int:
        """CTAs along K for tiles of `rows`, of units that fill all SMs `rounds` times."""
        if rows > 16 or rounds > 0.5:
            return 1
        return 2 if rounds > 0.25 else 4

    @abstractmethod
    def _gathers(self, rows: int, pair: bool, topk: int) -> bool:
        """Whether the formula has the first GEMM gather tokens, each for `topk` experts."""

    def check(self, tiling: Tiling) -> Tiling:
        """`tiling`.

        Raises:
            MoequantError: no kernel has it.
        """
        splits = _SPLITS if tiling.rows <= _SPLIT_ROWS else (1,)
        if (
            tiling.rows not in self.rows
            or not {tiling.split13, tiling.split2} <= set(splits)
            or (tiling.pair and tiling.rows not in self.pair_rows)
            or (tiling.gather and tiling.rows not in self.gather_rows)
        ):
            raise MoequantError(
                f"{tiling} is no tiling: rows is one of {self.rows}, a split 1, 2 or 4, and 1 "
                f"above {_SPLIT_ROWS} rows, pairs have {self.pair_rows} rows, gathering "
                f"{self.gather_rows}; tune again"
            )
        return tiling

    def every(self) -> list[Tiling]:
        """Tilings that, together, have each kernel of either GEMM: all whose splits are equal."""
        found = []
        flags = (False, True)
        for rows, split, pair, gather in product(self.rows, _SPLITS, flags, flags):
            tiling = Tiling(rows=rows, split13=split, split2=split, pair=pair, gather=gather)
            with suppress(MoequantError):
                found.append(self.check(tiling))
        return found

    def choose(self, problem: TuningProblem, *, of_user: bool = True) -> Tiling:
        """The measured tiling, else that of a GPU with the same number of SMs, else the formula's.

        Args:
            problem: what for.
            of_user: whether the user's tables count.

        Raises:
            MoequantError: a table is broken.
        """
        user = _user_folder() if of_user else None
        for measured in _measured(self, problem.gpu, problem.sms, user):
            if found := _nearest(measured.get(problem.sizes, {}), problem.tokens):
                return found
        return self.default(problem)

    def default(self, problem: TuningProblem) -> Tiling:
        """Rows that nearly all experts fit in under uniform routing; split while SMs are idle.

        At least those that `rows_for_skew` asks for.

        Pairs where nearly all experts have two tiles of 65 rows or more: what is left over of one
        that does not would wait for its partner.
        """
        pairs = problem.tokens * problem.topk
        mean = pairs / problem.experts
        rows = likely_tile_rows(mean, self.rows)
        busy = min(problem.tokens // 4, self.rows_for_skew)
        rows = max([rows, *(rows for rows in self.rows if rows <= busy)])
        pair = rows in self.pair_rows and mean - 2 * mean**0.5 > 192
        active = min(pairs, problem.experts)
        return Tiling(
            rows=rows,
            split13=self._split(rows, active * -(-problem.intermediate // 128) / problem.sms),
            split2=self._split(rows, active * -(-problem.hidden // 256) / problem.sms),
            pair=pair,
            gather=self._gathers(rows, pair, problem.topk),
        )

    def candidates(self, problem: TuningProblem) -> list[Tiling]:
        """The tilings worth timing for a problem, the formula's first.

        Tiles larger than the mean wants may suit skewed routing, up to the first that hold all
        tokens: an expert has at most one row of each.
        """
        default = self.default(problem)
        at = self.rows.index(default.rows)
        holding = sum(rows < problem.tokens for rows in self.rows)
        found = [default]
        for rows in self.rows[max(at - 1, 0) : max(at + 3, holding + 1)]:
            splits = {8: (1, 2, 4), 16: (1, 2)}.get(rows, (1,))
            found += [Tiling(rows=rows, split13=a, split2=b) for a in splits for b in splits]
            gathers = (False, True) if rows in self.gather_rows else (False,)
            pairs = (False, True) if rows in self.pair_rows else (False,)
            found += [Tiling(rows=rows, pair=p, gather=g) for p in pairs for g in gathers]
        return list(dict.fromkeys(found))

    def write(
        self, problem: TuningProblem, tiling: Tiling, time_us: float, path: Path | None = None
    ) -> Path:
        """Write the fastest tiling of a problem into a table, beside what it has of others.

        A table that cannot be read, or is of other kernels or another GPU or part of one, is
        replaced. Processes that write into one table at once wait for each other.

        Args:
            problem: what was measured.
            tiling: the fastest.
            time_us: how long it took.
            path: by default the user's table for that GPU.

        Returns:
            Where it is.

        Raises:
            OSError: it cannot be written.
        """
        path = path or self.user_table(problem.gpu)
        row = {"tokens": problem.tokens, **asdict(tiling), "time_us": round(time_us, 1)}
        with exclusive_lock(path):
            shapes = self._rows_to_keep(path, problem)
            shapes.setdefault(problem.sizes, {})[problem.tokens] = row
            write_atomically(path, self._document(problem, shapes).encode())
        forget_tables()
        return path

    def _rows_to_keep(self, path: Path, problem: TuningProblem) -> _RowsBySize:
        """Those of the table at `path`, unless it is broken or of other kernels or another GPU."""
        with suppress(MoequantError):
            table = self._read(path) if path.exists() else None
            if table and table.is_of(problem.gpu, problem.sms):
                return table.rows
        return {}

    def _document(self, problem: TuningProblem, shapes: _RowsBySize) -> str:
        """What a table with these rows holds."""
        document = {
            "format": self.name,
            "kernel": self.version,
            "gpu": problem.gpu,
            "sms": problem.sms,
            "shapes": [
                {
                    **dict(zip(_SIZES, sizes, strict=True)),
                    "tilings": [rows[tokens] for tokens in sorted(rows)],
                }
                for sizes, rows in shapes.items()
            ],
        }
        return json.dumps(document, indent=1) + "\n"

    def user_table(self, gpu: str) -> Path:
        """Where this user's table for a GPU of that name is, or would be."""
        slug = "".join(c if c.isalnum() else "_" for c in gpu.lower())
        return _user_folder() / f"{self.name}_{slug}.json"

    def is_table(self, path: Path, gpu: str) -> bool:
        """Whether the file at `path` is a table of this family and GPU, of any version."""
        try:
            table = json.loads(path.read_bytes())
            return bool((table["format"], table["gpu"]) == (self.name, gpu))
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def _read(self, path: Path) -> _Table | None:
        """A table; None if it is of another family or of other kernels."""
        try:
            table = json.loads(_text(path))
            if table["format"] != self.name:
                return None
            _check_types(table, {"kernel": (int,)})
            if table["kernel"] != self.version:
                return None
            _check_types({"sms": None, **table}, {"gpu": (str,), "sms": (int, NoneType)})
            rows = {
                tuple(shape[size] for size in _SIZES): {
                    row["tokens"]: row for row in shape["tilings"]
                }
                for shape in table["shapes"]
            }
            for sizes, by_tokens in rows.items():
                if not all(type(number) is int for number in (*sizes, *by_tokens)):
                    raise ValueError("sizes and tokens must be whole numbers")
                for row in by_tokens.values():
                    self.check(_tiling(row))
            return _Table(gpu=table["gpu"], sms=table.get("sms"), rows=rows)
        except MoequantError as error:
            raise MoequantError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MoequantError(
                f"{path} is no table of tilings ({error!r}); remove it, or tune again"
            ) from error


_TILING_TYPES = {
    "rows": (int,), "split13": (int,), "split2": (int,), "pair": (bool,), "gather": (bool,)
}  # fmt: skip
_RowsBySize = dict[tuple[int, ...], dict[int, dict[str, Any]]]
"""Rows of a table by sizes of the layer and tokens."""
_TilingsBySize = dict[tuple[int, ...], dict[int, Tiling]]


@dataclass(frozen=True, kw_only=True)
class _Table:
    gpu: str
    sms: int | None
    """None in a table of a version that did not write it."""
    rows: _RowsBySize

    def is_of(self, gpu: str, sms: int) -> bool:
        """Whether it was measured on such a GPU, with so many of its SMs."""
        return self.gpu == gpu and self.sms in (sms, None)


def _user_folder() -> Path:
    return cache_dir() / "tunings"


def forget_tables() -> None:
    """Let them be read again, as they are on disk."""
    _measured.cache_clear()


@cache
def _measured(
    tilings: Tilings, gpu: str, sms: int, user: Path | None
) -> tuple[_TilingsBySize, _TilingsBySize]:
    """Tilings of a GPU, the user's over ours, and ours of others with the same number of SMs.

    Of several others, the last by name of the file counts: an H200's, rather than an H100's.
    """
    ours = _tables(tilings, _OURS)
    users = [] if user is None else _tables(tilings, user)
    own = _merge(table for table in [*ours, *users] if table.is_of(gpu, sms))
    return own, _merge(table for table in ours if table.gpu != gpu and table.sms == sms)


def _tables(tilings: Tilings, folder: Path) -> list[_Table]:
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MoequantError(
            f"{folder}: tables of tilings cannot be listed: {error.strerror}; make the folder "
            "readable, or set MOEQUANT_CACHE_DIR to another"
        ) from error
    found = [path for path in entries if fnmatchcase(path.name, f"{tilings.name}_*.json")]
    return [table for table in map(tilings._read, found) if table]


def _text(path: Path) -> str:
    """What a table's file holds."""
    try:
        if path.is_fifo():  # reading would wait for a writer
            raise ValueError("it is a named pipe")
        return path.read_text()
    except OSError as error:
        raise MoequantError(
            f"cannot be read: {error.strerror}; make it a readable file, or remove it"
        ) from error


def _check_types(found: Mapping[str, Any], wanted: Mapping[str, tuple[type, ...]]) -> None:
    for name, types in wanted.items():
        if type(found[name]) not in types:
            wanted_types = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"{name} is {found[name]!r}, but must be of type {wanted_types}")


def _merge(tables: Iterable[_Table]) -> _TilingsBySize:
    found: _TilingsBySize = {}
    for table in tables:
        for sizes, rows in table.rows.items():
            known = {tokens: _tiling(row) for tokens, row in rows.items()}
            found.setdefault(sizes, {}).update(known)
    return found


def _nearest(measured: Mapping[int, Tiling], tokens: int) -> Tiling | None:
    """That of the nearest number of tokens by ratio, if it is at most NEAR."""
    near = [(max(m, tokens) / min(m, tokens), m) for m in measured if m > 0 and tokens > 0]
    return measured[min(near)[1]] if near and min(near)[0] <= NEAR else None


def _tiling(row: Mapping[str, Any]) -> Tiling:
    _check_types(row, _TILING_TYPES)
    return Tiling(**{part.name: row[part.name] for part in fields(Tiling)})
