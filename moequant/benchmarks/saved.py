"""Write what `moequant bench experts` measured, and read it as if it lied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError
from moequant.storage.disk import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_ANY = "*"
"""Stands for every key of an object, which has at least those beside it."""

_LEAST, _MOST = 1e-9, 1e18
"""Of every number, so that what is made of two of them stays finite."""

_TIME = {"median_us": float, "p20_us": float, "p80_us": float}
_CELL = {
    "tokens": int,
    "times": {_ANY: _TIME, "moequant": _TIME},
    "tiling": ({_ANY: (int, bool)}, None),
    "bytes_moved": float,
    "tb_per_s": float,
    "tflops": float,
    "floor_us": float,
    "share_of_floor": float,
    "stages_us": ({_ANY: float}, None),
    "host_us": (float, None),
}
_LAYER = {
    "shape": str,
    "experts": int,
    "hidden": int,
    "intermediate": int,
    "topk": int,
    "act_fn": str,
    "biased": bool,
    "backend": str,
    "refusals": {_ANY: str},
    "cells": [_CELL],
}
_RUN = {
    "measured": str,
    "method": str,
    "format": str,
    "machine": {_ANY: str, "gpu": str},
    "ceilings": {"read_tb_per_s": float, "fp8_tflops": (float, None), "bf16_tflops": float},
    "layers": [_LAYER],
}
"""Objects by their keys, lists of at least one, numbers in these bounds, text, truth; or one of
a tuple. The fields are those of `moequant.benchmarks.experts.ExpertsBenchmark`."""


def write_run(document: Mapping[str, Any], path: Path) -> None:
    """Write what `ExpertsBenchmark.document` holds; a file that is there stays until it is whole.

    Raises:
        MoequantError: `path` cannot be written.
    """
    replace_file(path, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")


def read_run(path: Path) -> dict[str, Any]:
    """The document of a run, `ExpertsBenchmark.document`.

    Raises:
        CheckpointError: the file cannot be read, or something in it is not what a run says.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    for fault in _faults(document, _RUN, "run"):
        raise CheckpointError(
            f"{path}: not what `moequant bench experts --output` writes: {fault}; measure again"
        )
    assert isinstance(document, dict)
    return document


def _faults(value: object, wanted: object, name: str) -> Iterator[str]:
    """What is wrong with `value`, which is called `name`."""
    if isinstance(wanted, tuple):
        if all(any(_faults(value, each, name)) for each in wanted):
            yield from _faults(value, wanted[0], name)
    elif isinstance(wanted, dict):
        yield from _faults_of_object(value, wanted, name)
    elif isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            yield f"{name} is no list of at least one"
            return
        for index, element in enumerate(value):
            yield from _faults(element, wanted[0], f"{name}[{index}]")
    elif wanted is str:
        if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
            yield f"{name} is no text"
    elif wanted is bool:
        if not isinstance(value, bool):
            yield f"{name} is neither true nor false"
    elif wanted is None:
        if value is not None:
            yield f"{name} is not null"
    elif not _is_number(value, whole=wanted is int):
        yield f"{name} is no number from {_LEAST:g} to {_MOST:g}"


def _faults_of_object(value: object, wanted: dict[str, Any], name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{name} is no object"
        return
    for key in wanted.keys() - {_ANY} - value.keys():
        yield f"{name} has no {key}"
    for key, element in value.items():
        yield from _faults(key, str, f"{name}: the name {key!r}")
        if key not in wanted and _ANY not in wanted:
            yield f"{name} has {key!r}, which is not known"
        else:
            yield from _faults(element, wanted.get(key, wanted.get(_ANY)), f"{name}.{key}")


def _is_number(value: object, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return _LEAST <= value <= _MOST
