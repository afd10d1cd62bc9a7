"""Time fused experts on a GPU, and compare with other implementations and a floor.

A cell is a layer, a number of tokens and a kind of routing. Its calls rotate over 8, 4 or 2 inputs,
each with its own ids, captured in one graph, so that data left in the L2 cache helps the next call
only as much as it would in use; where routing is not uniform, each input has another busiest
expert. Contenders take turns. The result is a JSON document:

    measured, method, format, machine, ceilings
    activations   scheme by which they are quantized before a GEMM
    products      "fp8" or "bf16": whose peak rate floors have, see `products_of`
    layers        per layer: shape and its sizes, act_fn, biased, backend, and
      refusals      why contenders were not timed, in some cells or at all
      cells         per number of tokens and routing:
        tokens        M
        routing       see `random_inputs`
        experts_used  experts that a call has tokens for
        busiest_pairs token-expert pairs of the expert that has most
        times         by contender that runs, `moequant` first: median_us, p20_us, p80_us
        tiling        of our kernels, if there is a choice; else null
        bytes_moved   that no kernel can avoid
        tb_per_s      bytes_moved over our time
        tflops        operations over our time
        floor_us      see `floor_us`
        share_of_floor  floor over our time; 1 is the limit
        to_uniform    our time over the floor, as a multiple of what it is with uniform routing;
                      null if that was not timed
        stages_us     of each of our launches, timed separately, if asked for; else null
        host_us       of an eager call of ours on the host, if asked for; else null
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from moequant.benchmarks.contenders import (
    capturable,
    check_known,
    make_contender,
    takes_absent_ids,
)
from moequant.benchmarks.cuda_timing import (
    REPLAYS,
    REST_S,
    TURNS,
    host_time_us,
    measure_ceilings,
    time_interleaved,
)
from moequant.benchmarks.layers import ROUTINGS, Inputs, random_experts, random_inputs
from moequant.benchmarks.machine import cuda_device, describe_machine
from moequant.benchmarks.stages import check_has_stages, time_stages, timed_tiling
from moequant.errors import (
    ArgumentError,
    MoequantError,
    NumericsError,
    UnsupportedError,
    unknown_name,
)
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts
from moequant.runtime.activations import FP8_SCHEMES, MXFP8
from moequant.runtime.packing import scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.benchmarks.contenders import Experts
    from moequant.benchmarks.cuda_timing import Ceilings
    from moequant.benchmarks.shapes import LayerShape
    from moequant.progress import Progress
    from moequant.runtime import ExpertWeights
    from moequant.runtime.activations import ActivationsChoice

OURS = "moequant"
"""Name of FusedExperts among the contenders."""

RESTS_FROM = 2048
"""Tokens from which the GPU rests between turns."""

METHOD = (
    f"Medians of {REPLAYS} CUDA-graph replays of 8 (to 8 tokens), 4 (to 512) or 2 calls with "
    f"inputs of their own, each routed by itself; contenders in {TURNS} turns, from {RESTS_FROM} "
    f"tokens on after {REST_S} s of rest each. Stages: each launch by itself, where in a call they "
    "overlap; a GEMM with the launch that sets its counter to 0. Host: an eager call of "
    "FusedExperts while the GPU is idle. Floor: weights of the experts chosen, input and output "
    "over the bandwidth, or products over the rate, the longer; both ceilings are of the same run. "
    "The weights of few experts stay in the L2 cache, so that such a call may pass its floor."
)

_PEERS_CALC_DIFF = 1e-2
"""Limit of `calc_diff` of others against the reference.

They may quantize activations differently or not at all: FP8 with 3 mantissa bits has an error of
2.6 %, 0.07 % in calc_diff for the operands of each of the two GEMMs, so 1e-2 detects wrong results
only."""

_CHECKED_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What to measure of every layer.

    Attributes:
        tokens: numbers of tokens, at least 1.
        format: format of the weights.
        activations: see `FusedExperts`; also of the reference and of other backends.
        routings: names out of ROUTINGS.
        backend: backend of FusedExperts; by default the best for the device.
        against: names of `moequant.benchmarks.contenders`.
        stages: whether to time each launch separately, if the backend has stages.
        host: whether to time the host side of eager calls.
    """

    tokens: Sequence[int]
    format: str
    activations: ActivationsChoice = "format"
    routings: Sequence[str] = ("uniform",)
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
) -> Iterator[dict[str, Any]]:
    """Time layers of random experts.

    Args:
        shapes: sizes of the layers, by name.
        measure: what to measure.
        device: a CUDA device.
        progress: receives every cell.

    Yields:
        After every layer, the document so far; see the module.

    Raises:
        ArgumentError: an unknown contender or routing.
        UnsupportedError: no CUDA device; a format that does not support these sizes; no backend,
            one that a CUDA graph cannot capture, or one without stages.
        NumericsError: our output is wrong.
    """
    check_known(measure.against)
    for routing in measure.routings:
        if routing not in ROUTINGS:
            raise ArgumentError(unknown_name("routing", routing, ROUTINGS))
    scheme = scheme_of(measure.format, measure.activations, static=False)
    place = cuda_device(device)
    report = progress or SilentProgress()
    with torch.cuda.device(place):
        for shape in shapes.values():
            _check_runs(shape, measure, place)
        ceilings = measure_ceilings(place)
        document = {
            "measured": datetime.now(UTC).date().isoformat(),
            "method": METHOD,
            "format": measure.format,
            "activations": scheme,
            "products": products_of(scheme, ceilings),
            "machine": describe_machine(place),
            "ceilings": vars(ceilings),
        }
        layers: list[dict[str, Any]] = []
        count = len(shapes) * len(measure.tokens) * len(measure.routings)
        report.start("timing", count, unit="cells")
        for name, shape in shapes.items():
            layers.append(_bench_layer(name, shape, measure, ceilings, place, report))
            yield {**document, "layers": [*layers]}
        report.finish()


def inputs_of(
    shape: LayerShape, tokens: int, device: torch.device, routing: str = "uniform"
) -> list[Inputs]:
    """The inputs that a cell rotates over."""
    count = 8 if tokens <= 8 else 4 if tokens <= 512 else 2
    return [
        random_inputs(
            shape,
            tokens,
            device,
            1000 * i + tokens,
            routing=routing,
            busiest=i * shape.experts // count,
        )
        for i in range(count)
    ]


def checked_tokens(tokens: int, device: torch.device) -> Tensor:
    """Indices of the tokens whose output is compared: about 16, or all."""
    return torch.arange(0, tokens, max(tokens // _CHECKED_TOKENS, 1), device=device)


def check_output(who: str, got: Tensor, want: Tensor, pick: Tensor, *, most: float) -> None:
    """Compare the output `got` [M, H] with the reference `want`, which is known for tokens `pick`.

    Raises:
        NumericsError: a value is not finite, or `calc_diff` is larger than `most`; names `who`.
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


def our_calc_diff(scheme: str) -> float:
    """The most `calc_diff` of a backend of ours against the reference, for bfloat16 tokens.

    Both quantize the hidden states to the same bits (tests/kernels). From there they differ by
    sums: tensor cores add FP8 products with about 14 bits, and what lies between the GEMMs of w4a8
    is rounded to bfloat16, each a relative error d of about 1e-3 in front of the middle
    quantization. It flips a code with probability d / ulp (E4M3: ulp about 2**-3.5), and each flip
    costs an ulp: sqrt(2 * d * ulp) = 1.3 % of error, calc_diff = error**2 / 2 = 9e-5, and half of
    that without the rounding; twice that where tensor cores sum over all columns, d = 2e-3. Few
    values flip where tokens are few, so it scatters: 5e-6 to 2e-4 were measured, and five times as
    much is allowed.

    Where activations are not quantized, sums are float32, and three roundings to bfloat16 are left
    (hidden states of other dtypes, what lies between the GEMMs, an expert's result), 2**-9 /
    sqrt(3) each: 2e-3 of error, calc_diff 2e-6, and as much again where they differ on both sides:
    5e-6 to 6e-6 were measured, and three times as much is allowed.

    Args:
        scheme: by which activations are quantized before a GEMM, of `activations.SCHEMES`.
    """
    return 2e-5 if scheme == "none" else 1e-3


def _check_runs(shape: LayerShape, measure: Measure, device: torch.device) -> None:
    """Check with a layer of one expert, before anything is timed, that ours can be timed."""
    few = dataclasses.replace(shape, experts=1, topk=1)
    ours = _our_experts(random_experts(few, measure.format, device), measure)
    if measure.stages:
        check_has_stages(ours)


def _our_experts(weights: ExpertWeights, measure: Measure) -> FusedExperts:
    return capturable(
        FusedExperts(weights, backend=measure.backend, activations=measure.activations)
    )


def _bench_layer(
    name: str,
    shape: LayerShape,
    measure: Measure,
    ceilings: Ceilings,
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    weights = random_experts(shape, measure.format, device)
    ours = _our_experts(weights, measure)
    contenders: dict[str, Experts] = {OURS: ours}
    refusals: dict[str, str] = {}
    for other in measure.against:
        try:
            contenders[other] = make_contender(other, weights, activations=measure.activations)
        except UnsupportedError as error:
            refusals[other] = str(error)
    reference = FusedExperts(weights, backend="torch_reference", activations=measure.activations)
    cells = []
    for M in measure.tokens:
        for routing in measure.routings:
            inputs = inputs_of(shape, M, device, routing)
            where = f"{M} tokens" + ("" if routing == "uniform" else f", {routing} routing")
            runs = dict(_right(contenders, reference, inputs[0], where, refusals))
            cell = _bench_cell(ours, weights, runs, inputs, measure=measure, ceilings=ceilings)
            cells.append({"tokens": M, "routing": routing, **cell})
            progress.advance(1, f"{name}, {where}")
    _compare_to_uniform(cells)
    return {
        "shape": name,
        **vars(shape),
        "act_fn": str(shape.act_fn),
        "backend": ours.chosen_backend(),
        "refusals": refusals,
        "cells": cells,
    }


def _right(
    contenders: Mapping[str, Experts],
    reference: FusedExperts,
    call: Inputs,
    where: str,
    refusals: dict[str, str],
) -> Iterator[tuple[str, Experts]]:
    """The contenders whose output is right; `refusals` receives the reasons of the others."""
    pick = checked_tokens(call.ids.shape[0], call.ids.device)
    want = reference(*(t[pick] for t in call.arguments))
    most = our_calc_diff(reference.packed().workload.activations)
    absent = bool((call.ids < 0).any())
    for name, experts in contenders.items():
        who = f"{name} at {where}"
        if name == OURS:
            check_output(who, experts(*call.arguments), want, pick, most=most)
        elif absent and not takes_absent_ids(name):
            refusals.setdefault(name, f"at {where}: it is timed only without ids of -1")
            continue
        else:
            try:
                check_output(who, experts(*call.arguments), want, pick, most=_PEERS_CALC_DIFF)
            # The others are what other packages raise: RuntimeError also where memory is short.
            except (MoequantError, RuntimeError, AssertionError, ValueError) as error:
                reason = (str(error) or repr(error)).splitlines()[0]
                refusals.setdefault(name, f"at {where}: {reason}")
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
) -> dict[str, Any]:
    M = inputs[0].ids.shape[0]
    rests = M >= RESTS_FROM
    times = time_interleaved(
        {
            name: [lambda e=experts, c=call: e(*c.arguments) for call in inputs]  # type: ignore[misc]
            for name, experts in contenders.items()
        },
        rests=rests,
    )
    bytes_moved, flop = work_of(weights, inputs)
    products = products_of(ours.packed().workload.activations, ceilings)
    floor, our_us = floor_us(bytes_moved, flop, ceilings, products), times[OURS].median_us
    first = inputs[0]
    return {
        **describe_routing(inputs, weights.experts),
        "times": {name: vars(time) for name, time in times.items()},
        "tiling": timed_tiling(ours, *first.ids.shape),
        "bytes_moved": bytes_moved,
        "tb_per_s": bytes_moved / our_us / 1e6,
        "tflops": flop / our_us / 1e6,
        "floor_us": floor,
        "share_of_floor": floor / our_us,
        "stages_us": time_stages(ours, first, rests=rests) if measure.stages else None,
        "host_us": host_time_us(lambda: ours(*first.arguments)) if measure.host else None,
    }


def _compare_to_uniform(cells: Sequence[dict[str, Any]]) -> None:
    """Give every cell `to_uniform`."""
    uniform = {c["tokens"]: c["share_of_floor"] for c in cells if c["routing"] == "uniform"}
    for cell in cells:
        share = uniform.get(cell["tokens"])
        cell["to_uniform"] = None if share is None else share / cell["share_of_floor"]


def products_of(scheme: str, ceilings: Ceilings) -> str:
    """Whose peak rate bounds a call: "fp8", or "bf16".

    FP8 where activations are quantized to it and the GPU multiplies it, also of a backend that then
    multiplies the same numbers in BF16: the floor is that of the numbers, not of the backend.

    Raises:
        UnsupportedError: a scheme whose rate is not measured.
    """
    if scheme == "none" or not ceilings.fp8_tflops:
        return "bf16"
    if scheme in FP8_SCHEMES or scheme == MXFP8:
        return "fp8"
    raise UnsupportedError(
        f"the peak rate of products with activations in {scheme} is not measured, so there is no "
        f"floor to compare with; time activations in none, {', '.join(FP8_SCHEMES)} or {MXFP8}"
    )


def describe_routing(inputs: Sequence[Inputs], experts: int) -> dict[str, float]:
    """`experts_used` and `busiest_pairs`, as means over `inputs`."""
    counts = torch.stack([(c.ids[c.ids >= 0]).bincount(minlength=experts) for c in inputs]).double()
    return {
        "experts_used": float((counts > 0).sum(1).double().mean()),
        "busiest_pairs": float(counts.max(1).values.mean()),
    }


def floor_us(bytes_moved: float, flop: float, ceilings: Ceilings, products: str) -> float:
    """The longer of the times to move the bytes and to do the operations; without launches.

    `products` is what `products_of` says.
    """
    rates = {"fp8": ceilings.fp8_tflops, "bf16": ceilings.bf16_tflops}
    rate = rates[products]
    assert rate, products
    return max(bytes_moved / ceilings.read_tb_per_s, flop / rate) / 1e6


def work_of(weights: ExpertWeights, inputs: Sequence[Inputs]) -> tuple[float, float]:
    """Bytes and operations of a call, as means over `inputs` with their routing.

    The bytes are the weights of the experts chosen, hidden states in, and output out; the
    operations are the multiplications and additions of all projections of every token-expert pair.
    """
    expert_bytes = sum(tensor.nbytes for tensor in weights.tensors().values()) / weights.experts
    moved = [
        len(set(call.ids.flatten().tolist()) - {-1}) * expert_bytes
        + 2 * call.hidden.nbytes  # output like input
        for call in inputs
    ]
    pair = 2 * len(weights.projections()) * weights.hidden * weights.intermediate
    flop = [int((call.ids >= 0).sum()) * pair for call in inputs]
    return sum(moved) / len(moved), sum(flop) / len(flop)
