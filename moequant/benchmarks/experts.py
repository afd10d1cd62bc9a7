"""Time the fused experts of layers on a GPU, beside others and beside the floor.

A cell is a layer and a number of tokens. It rotates over 8, 4 or 2 inputs with routings of their
own, captured in one graph, so that what a call leaves in L2 serves the next only where it would in
use. Contenders take turns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from moequant.benchmarks.contenders import capturable, check_known, make_contender
from moequant.benchmarks.cuda_timing import (
    REPLAYS,
    REST_S,
    TURNS,
    Time,
    host_time_us,
    measure_ceilings,
    time_interleaved,
)
from moequant.benchmarks.floor import work_of
from moequant.benchmarks.layers import Inputs, random_experts, random_inputs
from moequant.benchmarks.machine import cuda_device, describe_machine
from moequant.benchmarks.stages import check_has_stages, time_stages, timed_tiling
from moequant.errors import MoequantError, NumericsError, UnsupportedError
from moequant.formats import get_format
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.benchmarks.contenders import Experts
    from moequant.benchmarks.cuda_timing import Ceilings
    from moequant.benchmarks.shapes import LayerShape
    from moequant.progress import Progress
    from moequant.runtime import ExpertWeights

OURS = "moequant"
"""Name of FusedExperts with the backend it chooses, or that is asked for."""

RESTS_FROM = 2048
"""Tokens from which the GPU rests between turns."""

METHOD = (
    f"Medians of {REPLAYS} CUDA-graph replays of 8 (to 8 tokens), 4 (to 512) or 2 calls with "
    f"inputs of their own; uniform routing; contenders in {TURNS} turns, from {RESTS_FROM} tokens "
    f"on after {REST_S} s of rest each. Stages: each launch by itself, where in a call they "
    "overlap; a GEMM with the launch that sets its counter to 0. Host: an eager call of "
    "FusedExperts while the GPU is idle. Floor: weights of the experts chosen, input and output "
    "over the bandwidth, or products over the rate, the longer; both ceilings are of the same run."
)

_OUR_CALC_DIFF, _PEERS_CALC_DIFF = 1e-3, 1e-2
"""Ours against the float32 evaluation, derived in tests/runtime/test_sm90_fp8_block.py. A peer may
quantize activations otherwise, or not at all: FP8 with 3 bits of mantissa is 2.6 % off, 0.07 % in
calc_diff for each of the two GEMMs' operands, so 1e-2 tells a wrong result and no more."""

_CHECKED_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of tokens of a layer.

    Attributes:
        tokens: M.
        times: by contender, `moequant` first; only of those that run.
        tiling: of our kernels, where there is a choice; else None.
        bytes_moved: that no kernel can spare.
        tb_per_s: those over our time.
        tflops: of the products over our time.
        floor_us: see `Roofline.floor_us`.
        share_of_floor: floor over our time; 1 is the limit.
        stages_us: of each launch of ours by itself, where asked for; else None.
        host_us: of an eager call of ours on the host, where asked for; else None.
    """

    tokens: int
    times: dict[str, Time]
    tiling: dict[str, int | bool] | None
    bytes_moved: float
    tb_per_s: float
    tflops: float
    floor_us: float
    share_of_floor: float
    stages_us: dict[str, float] | None
    host_us: float | None


@dataclass(frozen=True, kw_only=True)
class LayerBenchmark:
    """One layer.

    Attributes:
        shape: what it was called.
        experts: E.
        hidden: H.
        intermediate: I.
        topk: T.
        act_fn: what its experts compute.
        biased: whether they have biases.
        backend: ours.
        refusals: why contenders were not timed, at some M or at all.
        cells: one for each M.
    """

    shape: str
    experts: int
    hidden: int
    intermediate: int
    topk: int
    act_fn: str
    biased: bool
    backend: str
    refusals: dict[str, str]
    cells: list[Cell]


@dataclass(frozen=True, kw_only=True)
class ExpertsBenchmark:
    """What a run measured, when, how, where, and with what."""

    measured: str
    method: str
    format: str
    machine: dict[str, str]
    ceilings: Ceilings
    layers: list[LayerBenchmark]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What to measure of every layer.

    Attributes:
        tokens: each M, at least 1.
        format: of the weights.
        backend: of ours; by default the best there is.
        against: names of `moequant.benchmarks.contenders`.
        stages: whether to time each launch by itself, of the backend sm90_fp8_block.
        host: whether to time eager calls on the host.
    """

    tokens: Sequence[int]
    format: str = "fp8_block"
    backend: str | None = None
    against: Sequence[str] = ()
    stages: bool = False
    host: bool = False


def bench_experts(
    shapes: Mapping[str, LayerShape],
    measure: Measure,
    *,
    device: torch.device | str = "cuda",
    progress: Progress | None = None,
) -> Iterator[ExpertsBenchmark]:
    """Time layers of random experts; see the module.

    Args:
        shapes: sizes of the layers, by what the result calls them.
        measure: what of them.
        device: a CUDA device.
        progress: told of every cell.

    Yields:
        After every layer, what has been measured until then.

    Raises:
        UnsupportedError: no CUDA device, a contender that is not known, a format that does not take
            these sizes, no backend, one whose calls no CUDA graph captures, or one without stages.
        NumericsError: our output is not that of the experts.
    """
    check_known(measure.against)
    place = cuda_device(device)
    report = progress or SilentProgress()
    with torch.cuda.device(place):
        for shape in shapes.values():
            _check_runs(shape, measure, place)
        result = ExpertsBenchmark(
            measured=datetime.now(UTC).date().isoformat(),
            method=METHOD,
            format=measure.format,
            machine=describe_machine(place),
            ceilings=measure_ceilings(place),
            layers=[],
        )
        report.start("timing", len(shapes) * len(measure.tokens), unit="sizes")
        for name, shape in shapes.items():
            layer = _bench_layer(name, shape, measure, result.ceilings, place, report)
            result = dataclasses.replace(result, layers=[*result.layers, layer])
            yield result
        report.finish()


def inputs_of(shape: LayerShape, tokens: int, device: torch.device) -> list[Inputs]:
    """The inputs that a cell rotates over."""
    count = 8 if tokens <= 8 else 4 if tokens <= 512 else 2
    return [random_inputs(shape, tokens, device, 1000 * i + tokens) for i in range(count)]


def checked_tokens(tokens: int, device: torch.device) -> Tensor:
    """Indices of the tokens whose output is compared: about 16, or all."""
    return torch.arange(0, tokens, max(tokens // _CHECKED_TOKENS, 1), device=device)


def check_output(
    who: str, got: Tensor, want: Tensor, pick: Tensor, *, most: float = _OUR_CALC_DIFF
) -> None:
    """Compare an output with that of the experts, which is known for some tokens.

    Args:
        who: whose it is.
        got: [M, H].
        want: [tokens picked, H].
        pick: indices of those tokens.
        most: of `calc_diff`.

    Raises:
        NumericsError: something in it is not finite, or is further off than rounding makes it.
    """
    diff = calc_diff(got[pick], want)
    if not (diff <= most and bool(got.isfinite().all())):
        raise NumericsError(
            f"{who} is not what the experts compute: calc_diff {diff:.2g}, at most {most:g} is due "
            "to rounding, or values that are not finite; leave it out, and report it"
        )


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (|x|^2 + |y|^2), DeepGEMM's measure; NaN where either has one."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


def _check_runs(shape: LayerShape, measure: Measure, device: torch.device) -> None:
    """Ask, before anything is timed, whether all can be: with a layer of few experts."""
    few = dataclasses.replace(shape, experts=1, topk=1)
    ours = _our_experts(random_experts(few, measure.format, device), measure)
    if measure.stages:
        check_has_stages(ours)


def _our_experts(weights: ExpertWeights, measure: Measure) -> FusedExperts:
    return capturable(FusedExperts(weights, backend=measure.backend))


def _bench_layer(
    name: str,
    shape: LayerShape,
    measure: Measure,
    ceilings: Ceilings,
    device: torch.device,
    progress: Progress,
) -> LayerBenchmark:
    # A packed layout need not hold gate, up and down as the reference and the contenders read them.
    weights = random_experts(shape, measure.format, device)
    ours = _our_experts(weights, measure)
    contenders: dict[str, Experts] = {OURS: ours}
    refusals: dict[str, str] = {}
    for other in measure.against:
        try:
            contenders[other] = make_contender(other, weights)
        except UnsupportedError as error:
            refusals[other] = str(error)
    cells = []
    for M in measure.tokens:
        inputs = inputs_of(shape, M, device)
        runs = dict(_right(contenders, weights, inputs[0], refusals))
        cells.append(_bench_cell(ours, weights, runs, inputs, measure=measure, ceilings=ceilings))
        progress.advance(1, f"{name}, {M} tokens")
    return LayerBenchmark(
        shape=name,
        experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        topk=shape.topk,
        act_fn=str(shape.act_fn),
        biased=shape.biased,
        backend=ours.chosen_backend(),
        refusals=refusals,
        cells=cells,
    )


def _right(
    contenders: Mapping[str, Experts],
    weights: ExpertWeights,
    call: Inputs,
    refusals: dict[str, str],
) -> Iterator[tuple[str, Experts]]:
    """The contenders whose output is that of the experts; of the others, `refusals` say why not."""
    M = call.ids.shape[0]
    pick = checked_tokens(M, call.ids.device)
    reference = FusedExperts(weights, backend="torch_reference")
    want = reference(*(t[pick] for t in call.arguments))
    for name, experts in contenders.items():
        who = f"{name} at {M} tokens"
        if name == OURS:
            check_output(who, experts(*call.arguments), want, pick)
        else:
            try:
                check_output(who, experts(*call.arguments), want, pick, most=_PEERS_CALC_DIFF)
            # What other packages raise where they do not run, out of memory included.
            except (MoequantError, RuntimeError) as error:
                refusals.setdefault(name, f"at {M} tokens: {str(error).splitlines()[0]}")
                continue
        yield name, experts


def _bench_cell(
    ours: FusedExperts,
    weights: ExpertWeights,
    contenders: Mapping[str, Experts],
    inputs: Sequence[Inputs],
    *,
    measure: Measure,
    ceilings: Ceilings,
) -> Cell:
    M = inputs[0].ids.shape[0]
    rests = M >= RESTS_FROM
    times = time_interleaved(
        {
            name: [lambda e=experts, c=call: e(*c.arguments) for call in inputs]  # type: ignore[misc]
            for name, experts in contenders.items()
        },
        rests=rests,
    )
    work = work_of(weights, inputs)
    fp8 = get_format(weights.format).activations != "none"
    floor_us, our_us = work.floor_us(ceilings, fp8=fp8), times[OURS].median_us
    first = inputs[0]
    return Cell(
        tokens=M,
        times=times,
        tiling=timed_tiling(ours, *first.ids.shape),
        bytes_moved=work.bytes_moved,
        tb_per_s=work.bytes_moved / our_us / 1e6,
        tflops=work.flop / our_us / 1e6,
        floor_us=floor_us,
        share_of_floor=floor_us / our_us,
        stages_us=time_stages(ours, first, rests=rests) if measure.stages else None,
        host_us=host_time_us(lambda: ours(*first.arguments)) if measure.host else None,
    )
