"""Find the fastest tiling of kernels for layers, and keep it for every later call.

Candidates take turns, as contenders of `bench experts` do. Of those that are nearly as fast as the
fastest with uniform routing, the one with the least product of its times with uniform and with
skewed routing is kept: tiles of more rows often cost one or two percent with the one, and save a
third with the other. The tiling that calls have now stays unless another is better by more than
runs differ. Each is checked before it is timed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moequant.benchmarks.cuda_timing import time_interleaved
from moequant.benchmarks.experts import (
    RESTS_FROM,
    check_output,
    checked_tokens,
    inputs_of,
    our_calc_diff,
)
from moequant.benchmarks.layers import random_experts
from moequant.benchmarks.machine import cuda_device
from moequant.errors import ArgumentError, MoequantError, UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.kernels.calls import part_tokens
from moequant.kernels.shared_files import exclusive_lock
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts
from moequant.storage.disk import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.benchmarks.shapes import LayerShape
    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice

_MARGIN = 0.99
"""Of the time of the tiling that calls have now, what another must stay under: medians of 20
replays differ by up to half a percent from run to run."""
_NEARLY = 0.97
"""Of the time of a tiling with uniform routing, what the fastest takes at least: others are not
considered, however they do with skewed routing."""


class TunedLayer:
    """A layer of random experts on a device.

    Args:
        shape: its sizes.
        format: of the weights.
        backend: of their kernels; by default the best there is.
        device: a CUDA device.
        activations: see `FusedExperts`.

    Raises:
        UnsupportedError: the format does not hold weights of these sizes, or no backend runs them.
    """

    def __init__(
        self,
        shape: LayerShape,
        format: str,
        backend: str | None,
        device: torch.device,
        *,
        activations: ActivationsChoice = "format",
    ) -> None:
        self.shape = shape
        self._device = device
        self._weights = random_experts(shape, format, device)
        self._activations = activations
        ours = FusedExperts(self._weights, backend=backend, activations=activations)
        self.tuner = ours.packed().tuner

    def times_us(
        self, tokens: int, tilings: Sequence[Any], routing: str = "uniform"
    ) -> dict[Any, float]:
        """Microseconds of a call of `tokens` tokens, by tiling.

        On a workspace of NaN, where a first call is compared with the reference. `routing` is that
        of `random_inputs`.

        Raises:
            NumericsError: a tiling computes something else.
        """
        topk, tuner = self.shape.topk, self.tuner
        assert tuner is not None
        with torch.cuda.device(self._device):
            tuner.compile_tilings(tokens, topk, tilings)
            inputs = inputs_of(self.shape, tokens, self._device, routing)
            pick = checked_tokens(tokens, self._device)
            reference = FusedExperts(
                self._weights, backend="torch_reference", activations=self._activations
            )
            want = reference(*(t[pick] for t in inputs[0].arguments))
            most = our_calc_diff(reference.packed().workload.activations)
            size_bytes = max(tuner.workspace_bytes(tokens, topk, tiling) for tiling in tilings)
            workspace = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            out = torch.empty_like(inputs[0].hidden)
            calls = {}
            for tiling in tilings:
                plan = tuner.plan(tokens, topk, tiling=tiling, workspace=workspace)
                workspace.fill_(0xFF)
                out.fill_(float("nan"))
                plan(*inputs[0].arguments, out)
                check_output(f"{tiling} at {tokens} tokens", out, want, pick, most=most)
                calls[tiling] = [lambda p=plan, c=call: p(*c.arguments, out) for call in inputs]
            times = time_interleaved(calls, rests=tokens >= RESTS_FROM)
        return {tiling: time.median_us for tiling, time in times.items()}


def tune(
    shapes: Mapping[str, LayerShape],
    tokens: Sequence[int],
    *,
    formats: Sequence[str] | None = None,
    activations: ActivationsChoice = "format",
    backend: str | None = None,
    device: torch.device | str = "cuda",
    path: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time the candidates for every M, and write the fastest to a table that calls look into.

    The table is written after each M, so what was found until then outlives an interruption.

    Args:
        shapes: sizes of the layers, by what the result calls them.
        tokens: the M to tune; calls of about so many tokens use the same tiling.
        formats: of the weights; by default every one whose backend has tilings.
        activations: see `FusedExperts`.
        backend: whose kernels; by default the best there is.
        device: a CUDA device.
        path: of the table of one format; by default the user's, which calls prefer to the one that
            moequant brings.
        progress: told of every M.

    Returns:
        A JSON document: `gpu`, the `activations` asked for, the `tables` written by format,
        `refusals` of formats of layers that were left out, and `cells`: for each `shape`, `format`
        and number of `tokens` the tiling `before` and `after`, and all that were `tried`, the
        fastest first, each with the microseconds of a call, and of one with skewed routing if it is
        nearly as fast as the fastest (else null).

    Raises:
        ArgumentError: more tokens than are run at once, or several tables for one `path`.
        UnsupportedError: no such device, no backend there that has tilings, a format in `formats`
            that holds none of the layers, or a file at `path` that is no table of this GPU.
        NumericsError: a tiling computes something else than the experts.
        MoequantError: a table cannot be written, which is asked before anything is timed.
        OSError: a table could be written when that was asked, and can no longer be.
    """
    place = cuda_device(device)
    _check_tokens(shapes, tokens)
    layer_of = partial(TunedLayer, backend=backend, device=place, activations=activations)
    refusals: dict[tuple[str, str], UnsupportedError] = {}
    tables: dict[tuple[str, str], Path] = {}
    for name, shape in shapes.items():
        for each in CONVERTIBLE if formats is None else formats:
            try:
                tuner = layer_of(replace(shape, experts=1, topk=1), each).tuner
            except UnsupportedError as error:
                refusals[name, each] = error
                continue
            if tuner is not None:
                tables[name, each] = tuner.table(path)
    for each in formats or ():
        refused = [refusals.get((name, each)) for name in shapes]
        if refused and refused[0] is not None and None not in refused:
            raise refused[0]
    table_of = {each: table for (_, each), table in tables.items()}
    _check_tables(table_of, path, backend)
    report = progress or SilentProgress()
    report.start("tuning", len(tables) * len(tokens), unit="sizes")
    cells = []
    for (name, each), table in tables.items():
        for cell in _tune_layer(layer_of(shapes[name], each), tokens, table):
            cells.append({"shape": name, "format": each, **cell})
            report.advance(1, f"{name} in {each}, {cell['tokens']} tokens")
    report.finish()
    return {
        "gpu": torch.cuda.get_device_name(place),
        "activations": activations,
        "tables": {each: str(table) for each, table in table_of.items()},
        "refusals": {", ".join(layer): str(error) for layer, error in refusals.items()},
        "cells": cells,
    }


def _tune_layer(layer: TunedLayer, tokens: Sequence[int], table: Path) -> Iterator[dict[str, Any]]:
    """Write the fastest tiling for each M to the table; what `tune` says of each."""
    tuner, topk = layer.tuner, layer.shape.topk
    assert tuner is not None
    # Before any is kept, which those of near numbers of tokens would start from.
    for M, tilings in [(M, tuner.tilings(M, topk)) for M in tokens]:
        kept, tried = _tuned(layer, M, tilings)
        tuner.keep(M, topk, kept, tried[kept]["time_us"], table)
        yield {
            "tokens": M,
            "before": tried[tilings[0]],
            "after": tried[kept],
            "tried": list(tried.values()),
        }


def _check_tokens(shapes: Mapping[str, LayerShape], tokens: Iterable[int]) -> None:
    for M in tokens:
        for name, shape in shapes.items():
            if (part := part_tokens(M, shape.topk)) != M:
                raise ArgumentError(
                    f"{M} tokens of {name} run in parts of {part}; tune at most that many"
                )


def _check_tables(tables: Mapping[str, Path], path: Path | None, backend: str | None) -> None:
    """Ask, before anything is timed, whether there is something to tune, and where to write it."""
    if not tables:
        who = "no backend that runs here has" if backend is None else f"backend {backend!r} has no"
        raise UnsupportedError(
            f"{who} tilings to choose from; those of the sm90 backends are tuned; `moequant "
            "formats --backends` shows which run here, and why others do not"
        )
    if path is not None and len(tables) > 1:
        raise ArgumentError(
            f"{path} would be the table of {', '.join(tables)}, but each format has a table of its "
            "own; choose one with --format"
        )
    for table in tables.values():
        try:
            table.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MoequantError(
                f"{table.parent}: cannot be created: {error.strerror}; name another table"
            ) from error
        check_writable(table)
        try:
            with exclusive_lock(table):
                pass
        except OSError as error:
            raise MoequantError(
                f"{table}.lock: cannot be locked: {error.strerror}; remove it, or name another "
                "table"
            ) from error


def _tuned(
    layer: TunedLayer, tokens: int, tilings: Sequence[Any]
) -> tuple[Any, dict[Any, dict[str, Any]]]:
    """The tiling that is kept of those for so many tokens, and what was measured of each.

    The first is what calls have now; the result has the fastest first.
    """
    us = layer.times_us(tokens, tilings)
    near = [t for t in tilings if us[t] * _NEARLY <= min(us.values())]
    skewed = layer.times_us(tokens, near, "skewed")
    kept = _fastest(tilings[0], {t: (us[t] * skewed[t]) ** 0.5 for t in near})
    tried = {
        t: {"tiling": asdict(t), "time_us": us[t], "skewed_us": skewed.get(t)}
        for t in sorted(us, key=us.__getitem__)
    }
    return kept, tried


def _fastest(now: Any, us: Mapping[Any, float]) -> Any:
    """The tiling that is kept: `now`, unless it is not timed or slower by more than runs differ."""
    best = min(us, key=us.__getitem__)
    return now if now in us and us[best] >= _MARGIN * us[now] else best
