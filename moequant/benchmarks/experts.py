"""Time the fused experts of a layer on a GPU, beside others and beside the floor.

A cell rotates over 8, 4 or 2 inputs with routings of their own, captured in one graph, so that what
a call leaves in L2 serves the next only where it would in use. Contenders take turns.
"""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moequant._version import __version__
from moequant.benchmarks.contenders import capturable, make_contender
from moequant.benchmarks.cuda_timing import Time, measure_ceilings, time_interleaved
from moequant.benchmarks.floor import work_of
from moequant.benchmarks.layers import Inputs, random_experts, random_inputs
from moequant.errors import NumericsError, UnsupportedError
from moequant.formats import get_format
from moequant.runtime import FusedExperts
from moequant.runtime.load import usable_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from moequant.benchmarks.contenders import Experts
    from moequant.benchmarks.cuda_timing import Ceilings
    from moequant.benchmarks.shapes import LayerShape
    from moequant.runtime import ExpertWeights

OURS = "moequant"
"""Name of FusedExperts with the backend it chooses, or that is asked for."""

_OUR_CALC_DIFF, _PEERS_CALC_DIFF = 1e-3, 1e-2
"""Ours against the float32 evaluation, derived in tests/runtime/test_sm90_fp8_block.py. A peer may
quantize activations otherwise, or not at all: FP8 with 3 bits of mantissa is 2.6 % off, 0.07 % in
calc_diff for each of the two GEMMs' operands, so 1e-2 tells a wrong result and no more."""

_CHECKED_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape and number of tokens.

    Attributes:
        tokens: M.
        times: by contender, `moequant` first; only of those that run.
        refusals: why the others do not.
        bytes_moved: that no kernel can spare.
        tb_per_s: those over our time.
        tflops: of the products over our time.
        floor_us: see `Work.floor_us`.
        share_of_floor: floor over our time; 1 is the limit.
    """

    tokens: int
    times: dict[str, Time]
    refusals: dict[str, str]
    bytes_moved: float
    tb_per_s: float
    tflops: float
    floor_us: float
    share_of_floor: float


@dataclass(frozen=True, kw_only=True)
class ExpertsBenchmark:
    """What a run measured, where, and with what."""

    shape: str
    format: str
    backend: str
    machine: dict[str, str]
    ceilings: Ceilings
    cells: list[Cell]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def bench_experts(
    shape: LayerShape,
    tokens: Sequence[int],
    *,
    format: str = "fp8_block",
    backend: str | None = None,
    against: Sequence[str] = (),
    device: torch.device | str = "cuda",
    name: str | None = None,
) -> ExpertsBenchmark:
    """Time a layer of random experts; see the module.

    Args:
        shape: sizes of the layer.
        tokens: the M to time, each at least 1.
        format: of the weights.
        backend: of ours; by default the best there is.
        against: names of `moequant.benchmarks.contenders`.
        device: a CUDA device.
        name: what the result calls the shape.

    Raises:
        UnsupportedError: no CUDA device, a format that does not take these sizes, no backend, or
            one whose calls no CUDA graph captures.
        NumericsError: a contender's output is not that of the experts.
    """
    place = cuda_device(device)
    weights = random_experts(shape, format, place)
    ours = capturable(FusedExperts(weights, backend=backend))
    weights = ours.weights
    ceilings = measure_ceilings(place)
    contenders: dict[str, Experts] = {OURS: ours}
    refusals = {}
    for other in against:
        try:
            contenders[other] = make_contender(other, weights)
        except UnsupportedError as error:
            refusals[other] = str(error)
    return ExpertsBenchmark(
        shape=name or str(shape),
        format=format,
        backend=ours.chosen_backend(),
        machine=describe_machine(place),
        ceilings=ceilings,
        cells=list(_cells(shape, tokens, ours, contenders, refusals, ceilings)),
    )


def describe_machine(device: torch.device) -> dict[str, str]:
    """GPU and versions."""
    from triton import __version__ as triton

    return {
        "gpu": torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton,
        "moequant": __version__,
    }


def cuda_device(device: torch.device | str) -> torch.device:
    """The CUDA device called that, with its index.

    Raises:
        UnsupportedError: it is no CUDA device, or not one that is here.
    """
    place = usable_device(device)
    if place.type != "cuda":
        raise UnsupportedError(
            f"device {str(device)!r}: experts are timed by replaying CUDA graphs; choose a CUDA "
            "device"
        )
    return place


def inputs_of(shape: LayerShape, tokens: int, device: torch.device) -> list[Inputs]:
    """The inputs that a cell rotates over."""
    count = 8 if tokens <= 8 else 4 if tokens <= 512 else 2
    return [random_inputs(shape, tokens, device, 1000 * i + tokens) for i in range(count)]


def _cells(
    shape: LayerShape,
    tokens: Sequence[int],
    ours: FusedExperts,
    contenders: dict[str, Experts],
    refusals: dict[str, str],
    ceilings: Ceilings,
) -> Iterator[Cell]:
    weights = ours.weights
    fp8 = get_format(weights.format).activations != "none"
    for M in tokens:
        inputs = inputs_of(shape, M, weights.device)
        for name, experts in contenders.items():
            _check(name, experts, weights, inputs[0])
        times = time_interleaved(
            {
                name: [lambda e=experts, c=call: e(*c.arguments) for call in inputs]  # type: ignore[misc]
                for name, experts in contenders.items()
            }
        )
        work = work_of(weights, inputs)
        floor_us, our_us = work.floor_us(ceilings, fp8=fp8), times[OURS].median_us
        yield Cell(
            tokens=M,
            times=times,
            refusals=refusals,
            bytes_moved=work.bytes_moved,
            tb_per_s=work.bytes_moved / our_us / 1e6,
            tflops=work.flop / our_us / 1e6,
            floor_us=floor_us,
            share_of_floor=floor_us / our_us,
        )


def _check(name: str, experts: Experts, weights: ExpertWeights, call: Inputs) -> None:
    """Compare some tokens with the float32 evaluation."""
    got = experts(*call.arguments)
    pick = torch.arange(got.shape[0], device=got.device)
    pick = pick[:: max(got.shape[0] // _CHECKED_TOKENS, 1)]
    reference = FusedExperts(weights, backend="torch_reference")
    want = reference(*(t[pick] for t in call.arguments))
    diff = calc_diff(got[pick], want)
    most = _OUR_CALC_DIFF if name == OURS else _PEERS_CALC_DIFF
    if not diff <= most:
        raise NumericsError(
            f"{name} at {got.shape[0]} tokens is not what the experts compute: calc_diff {diff:.2g}"
            f", at most {most:g} is due to rounding; leave it out, and report it"
        )


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (|x|^2 + |y|^2), DeepGEMM's measure; NaN where either has one."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))
