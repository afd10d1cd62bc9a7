"""Which tiling a call of a size runs best with: by formula, or by what was measured.

A table is a JSON file of measurements on one GPU. Ours are in `tunings/`, a user's in
MOEQUANT_CACHE_DIR/tunings (default ~/.cache/moequant/tunings), and these win:

    {
     "format": "fp8_block", "kernel": 2, "gpu": "NVIDIA H200",
     "shapes": [
      {"experts": 8, "hidden": 4096, "intermediate": 14336, "topk": 2,
       "tilings": [{"tokens": 1, "rows": 8, "split13": 2, "split2": 2, "pair": false,
                    "gather": false, "time_us": 93.1}]}
     ]
    }

`kernel` is KERNEL of the code that was measured: a table of another one is passed over. `time_us`
is for people. A call takes the tiling of the measured number of tokens that is nearest by ratio, if
at most NEAR apart; else the formula's.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moequant.errors import MoequantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KERNEL = 3
"""Rises when the kernels change so that old measurements mislead."""
NEAR = 1.5
"""A tiling holds for this many times fewer or more tokens than it was measured with."""
FORMAT = "fp8_block"
EXTRA_ROWS = 16

_SIZES = ("experts", "hidden", "intermediate", "topk")
_ROWS = (8, 16, 32, 64, 128)
_OURS = Path(__file__).with_name("tunings")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tunable part of a plan.

    Attributes:
        rows: most rows of a tile: 8, 16, 32, 64 or 128; the smaller the fewer wasted, the larger
            the fewer times weights are read.
        split13: CTAs along K of the first GEMM: 1, 2 or 4; 1 from 64 rows up.
        split2: of the second.
        pair: whether two CTAs share the weights that two tiles of an expert need; for 128 rows.
        gather: whether the first GEMM copies the tokens of its rows out of all of them, instead of
            reading a copy of each token for each of its experts; for 64 and 128 rows.
    """

    rows: int
    split13: int = 1
    split2: int = 1
    pair: bool = False
    gather: bool = False

    @property
    def extra(self) -> int:
        """Rows that a tile may have beyond `rows`, rather than leave them to a tile of their own.

        For 128 rows. Where CTAs share weights both would wait; what copies tokens wants registers.
        """
        return EXTRA_ROWS if self.rows == 128 and not self.pair and not self.gather else 0

    def __post_init__(self) -> None:
        splits = (1, 2, 4) if self.rows <= 32 else (1,)
        if (
            self.rows not in _ROWS
            or not {self.split13, self.split2} <= set(splits)
            or (self.pair and self.rows != 128)
            or (self.gather and self.rows < 64)
        ):
            raise MoequantError(
                f"{self} is no tiling: rows is one of {_ROWS}, a split 1, 2 or 4, and 1 from 64 "
                "rows up, pairs are for 128 rows and gathering for 64 and 128; tune again"
            )


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


def tiling_for(problem: TuningProblem) -> Tiling:
    """The measured tiling, else the formula's."""
    shape = (problem.experts, problem.hidden, problem.intermediate, problem.topk)
    measured = _tables(problem.gpu, _user_folder()).get(shape, {})
    near = [
        (max(tokens, problem.tokens) / min(tokens, problem.tokens), tokens)
        for tokens in measured
        if tokens > 0 and problem.tokens > 0
    ]
    if near and min(near)[0] <= NEAR:
        return measured[min(near)[1]]
    return default_tiling(problem)


def default_tiling(problem: TuningProblem) -> Tiling:
    """Rows that nearly all experts fit in under uniform routing; split while SMs are idle.

    Pairs where nearly all experts have two tiles of 65 rows or more: what is left over of one that
    does not would wait for its partner. Copies of tokens cost memory bandwidth, which is free there
    and is what fewer rows wait for.
    """
    slots = problem.tokens * problem.topk
    mean = slots / problem.experts
    likely = mean + 2 * mean**0.5
    rows = next((rows for rows in _ROWS if likely <= rows), _ROWS[-1])
    pair = mean - 2 * mean**0.5 > 192
    active = min(slots, problem.experts)

    def split(units: int) -> int:
        # Halves fill SMs that have nothing, and the second of two rounds that is not full.
        rounds = units / problem.sms
        return 2 if rows <= 16 and (rounds <= 0.5 or 1 < rounds < 2) else 1

    return Tiling(
        rows=rows,
        split13=split(active * -(-problem.intermediate // 128)),
        split2=split(active * -(-problem.hidden // 256)),
        pair=pair,
        gather=pair,
    )


def candidates(problem: TuningProblem) -> list[Tiling]:
    """The tilings worth timing for a problem, the formula's first."""
    default = default_tiling(problem)
    at = _ROWS.index(default.rows)
    found = [default]
    for rows in _ROWS[max(at - 1, 0) : at + 2]:
        splits = {8: (1, 2, 4), 16: (1, 2)}.get(rows, (1,))
        found += [Tiling(rows=rows, split13=a, split2=b) for a in splits for b in splits]
        if rows >= 64:
            found.append(Tiling(rows=rows, gather=True))
        if rows == 128:
            found += [Tiling(rows=rows, pair=True, gather=gather) for gather in (False, True)]
    return list(dict.fromkeys(found))


def write_table(
    gpu: str, measured: Iterable[tuple[TuningProblem, Tiling, float]], path: Path | None = None
) -> Path:
    """Write the fastest tiling of each problem into a table, beside what it has of others.

    A table that cannot be read, or is of other kernels or another GPU, is replaced.

    Args:
        gpu: the name of the GPU measured on.
        measured: problems on it, their fastest tilings, and the microseconds these took.
        path: by default the user's table for that GPU.

    Returns:
        Where it is.
    """
    path = path or user_table(gpu)
    try:
        shapes = _rows(path, gpu) if path.exists() else {}
    except MoequantError:
        shapes = {}
    for problem, tiling, time_us in measured:
        sizes = (problem.experts, problem.hidden, problem.intermediate, problem.topk)
        row = {"tokens": problem.tokens, **asdict(tiling), "time_us": round(time_us, 1)}
        shapes.setdefault(sizes, {})[problem.tokens] = row
    document = {
        "format": FORMAT,
        "kernel": KERNEL,
        "gpu": gpu,
        "shapes": [
            {
                **dict(zip(_SIZES, sizes, strict=True)),
                "tilings": [rows[tokens] for tokens in sorted(rows)],
            }
            for sizes, rows in shapes.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)
    _tables.cache_clear()
    return path


def user_table(gpu: str) -> Path:
    """Where this user's table for a GPU of that name is, or would be."""
    return _user_folder() / f"{FORMAT}_{_slug(gpu)}.json"


def _user_folder() -> Path:
    cache_dir = os.environ.get("MOEQUANT_CACHE_DIR", Path.home() / ".cache" / "moequant")
    return Path(cache_dir) / "tunings"


def _slug(gpu: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in gpu.lower())


@cache
def _tables(gpu: str, user: Path) -> dict[tuple[int, ...], dict[int, Tiling]]:
    """Tilings by shape and tokens: ours, then the user's over them."""
    found: dict[tuple[int, ...], dict[int, Tiling]] = {}
    for folder in (_OURS, user):
        for path in sorted(folder.glob(f"{FORMAT}_*.json")):
            for sizes, rows in _rows(path, gpu).items():
                tilings = {tokens: _tiling(row) for tokens, row in rows.items()}
                found.setdefault(sizes, {}).update(tilings)
    return found


def _rows(path: Path, gpu: str) -> dict[tuple[int, ...], dict[int, dict[str, Any]]]:
    """The rows of a table by shape and tokens; none if it is of other kernels or another GPU."""
    try:
        table = json.loads(path.read_text())
        if (table["format"], table["kernel"], table["gpu"]) != (FORMAT, KERNEL, gpu):
            return {}
        rows = {
            tuple(shape[size] for size in _SIZES): {row["tokens"]: row for row in shape["tilings"]}
            for shape in table["shapes"]
        }
        for row in (row for by_tokens in rows.values() for row in by_tokens.values()):
            _tiling(row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoequantError(
            f"{path} is no table of tilings ({error!r}); remove it, or tune again"
        ) from error
    return rows


def _tiling(row: Mapping[str, Any]) -> Tiling:
    return Tiling(**{part.name: row[part.name] for part in fields(Tiling)})
