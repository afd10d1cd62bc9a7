"""Run layers: compare the runtime with a reference evaluation, and measure the layers' error.

The runtime must agree with an independent evaluation of the same quantized weights, up to
accumulation error. The error relative to the source's layer is reported, and a problem from 100 %.

Accumulation error has two bounds. One holds for every element and any order of the sums; for
thousands of columns it is so wide that a result rounded to bfloat16 would pass. The other is on the
norm: rounding errors of mixed sign grow as sqrt(K) u, u = 2**-24, which is 2**-17 for K = 2**14,
while a single rounding to bfloat16 costs 2**-9 / sqrt(3) or more.

Where layers are served by another device or backend, each runs there too: see `serving`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from moequant.errors import MoequantError
from moequant.models import ROUTED_EXPERTS
from moequant.runtime import FusedExperts
from moequant.runtime.layer_reader import LayerReader
from moequant.verification.decode import decode
from moequant.verification.layer_activations import fit, read_activations
from moequant.verification.layer_batch import TOKENS, make_batch
from moequant.verification.reference import activation, evaluate_layer
from moequant.verification.report import LayerCheck
from moequant.verification.serving import most_error
from moequant.weights.source_weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Literal

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.conversion import Unit
    from moequant.models import TensorRole
    from moequant.verification.expectation import Verification
    from moequant.verification.findings import Findings
    from moequant.verification.layer_activations import LayerActivations
    from moequant.verification.layer_batch import Batch
    from moequant.verification.serving import Serving
    from moequant.weights.converted import ConvertedCheckpoint

    Layers = Literal["all"] | int
    _Evaluated = tuple[Tensor, Tensor, float]
    """Output, its bound, and the largest magnitude of the inputs of down."""

DEFAULT_LAYERS = 3
REFERENCE = "torch_reference"
"""The backend that is compared with the independent evaluation."""
MOST_RELATIVE_ERROR = 2.0**-13


def converted_layers(units: Iterable[Unit], roles: Mapping[str, TensorRole]) -> dict[int, str]:
    """Format by layer whose routed experts are converted, in order."""
    formats: dict[int, str] = {}
    for unit in units:
        role = roles[unit.name]
        if role.role == ROUTED_EXPERTS and role.layer is not None:
            formats.setdefault(role.layer, unit.format)
    return formats


def choose_layers(layers: Sequence[int], wanted: Layers) -> list[int]:
    """All layers, or a number of them spread evenly: three are first, middle and last."""
    if wanted == "all":
        return list(layers)
    count = min(wanted, len(layers))
    last = len(layers) - 1
    return [layers[i * last // max(count - 1, 1)] for i in range(count)]


def check_layers(
    run: Verification,
    converted: ConvertedCheckpoint,
    layers: Iterable[int],
    serving: Serving | None,
) -> tuple[LayerCheck, ...]:
    """Run some experts of each of `layers`, one layer after the other, in a thread of the pool.

    Args:
        run: what is verified.
        converted: the converted checkpoint, under the config that it should have.
        layers: their indices.
        serving: where the layers run too; None for the CPU reference alone.

    Raises:
        CheckpointError: the source cannot be read.
        UnsupportedError: no backend runs a layer where it is served.
    """
    moe, layers = converted.moe, list(layers)
    batch = make_batch(moe)
    expert_bytes = len(moe.projections) * moe.hidden * moe.intermediate * len(batch.experts)
    run.progress.start("layers", expert_bytes * len(layers))
    reader = LayerReader(converted, torch.device("cpu"))

    def check(layer: int) -> LayerCheck | None:
        found = None
        try:
            weights = reader.read(layer, batch.experts)
            experts = FusedExperts(weights, backend=REFERENCE, expert_map=batch.expert_map)
        except MoequantError as error:
            run.findings.add("layers", f"layer {layer}", str(error))
        else:
            found = _measure(run, converted, layer, batch, experts, serving)
            _judge(found, run.findings)
        run.progress.advance(expert_bytes, moe.whereabouts(layer))
        return found

    checks = [run.pool.submit(check, layer).result() for layer in layers]
    run.progress.finish()
    return tuple(found for found in checks if found is not None)


def _judge(check: LayerCheck, findings: Findings) -> None:
    name = f"layer {check.layer}"
    if not check.layer_error < 1:
        off, found = check.layer_error, "gives NaN or infinity, itself or in the source"
        if not math.isnan(off):
            found = f"off by {off:.0%} from the source's layer, so that zeros would be as near"
        advice = f"keep its experts in place of {check.format}, or choose another format"
        findings.add("layers", name, f"{found}; {advice}")
    if not (check.runtime_error <= 1 and check.runtime_relative_error <= MOST_RELATIVE_ERROR):
        findings.add(
            "layers",
            name,
            f"the runtime is off from the reference evaluation of its {check.format} weights by "
            f"{check.runtime_error:.3g} of the bound on an element, and by "
            f"{check.runtime_relative_error:.3g} in norm, where accumulation in float32 explains "
            f"1 and {MOST_RELATIVE_ERROR:.3g}",
        )
    limit = most_error(check.activations, tokens=check.tokens)
    if check.backend_error is not None and not check.backend_error <= limit:
        findings.add(
            "backend",
            name,
            f"{check.backend} on {check.device} is off from the CPU reference with the same "
            f"{check.format} weights by {check.backend_error:.3g} in norm, where its roundings "
            f"explain {limit:.3g}",
        )


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """Evaluates a layer in float64, with weights of either checkpoint and biases of the source's.

    Attributes:
        batch: its input, but for the hidden states.
        act_fn: the activation function.
        biases: by projection and expert; None if the layer has none.
    """

    batch: Batch
    act_fn: ActFn
    biases: Mapping[str, Tensor] | None

    def __call__(self, weight: Callable[[str, int], Tensor], hidden: Tensor) -> _Evaluated:
        """With `weight` of a projection and an expert's id, and hidden states [M, H]."""
        act_fn, biases, reach = self.act_fn, self.biases, [0.0]
        output, bound = evaluate_layer(
            hidden,
            self.batch.topk_ids,
            self.batch.topk_weights,
            weight,
            gated=act_fn.gated,
            bias=None if biases is None else lambda p, e: biases[p][e].double(),
            activate=activation(
                act_fn.name, gated=act_fn.gated, alpha=act_fn.alpha, limit=act_fn.limit
            ),
            watch=lambda inputs: reach.append(float(inputs.abs().max())),
        )
        return output, bound, max(reach)


def _measure(
    run: Verification,
    converted: ConvertedCheckpoint,
    layer: int,
    batch: Batch,
    experts: FusedExperts,
    serving: Serving | None,
) -> LayerCheck:
    local = {expert: i for i, expert in enumerate(batch.experts)}
    projections = experts.weights.projections()

    def quantized(projection: str, expert: int) -> Tensor:
        return decode(projections[projection][local[expert]])

    def original(projection: str, expert: int) -> Tensor:
        name = converted.architecture.expert_tensor(layer, expert, projection)
        info = run.expected.original.weights[name]
        return read_weights(run.source, [info])[0].double()

    evaluate = _Evaluation(
        batch=batch,
        act_fn=converted.moe.act_fn_of(layer),
        biases=converted.read_biases(layer),
    )
    activations = read_activations(converted, layer, experts, batch.experts)
    fitted = fit(batch.hidden, activations, partial(evaluate, quantized))
    reference, bound, hidden = fitted.reference, fitted.bound, fitted.hidden
    wanted, wanted_bound, _ = evaluate(original, hidden)
    routing = batch.topk_weights, batch.topk_ids
    plain = experts(hidden, *routing, activations="none").double()
    quantized_error = None
    if activations.experts is not None and fitted.not_measured is None:
        own = activations.experts(hidden, *routing, activations=activations.choice)
        quantized_error = _relative(own.double(), wanted, wanted_bound)
    served_by, served_error = _serve(serving, activations, batch, hidden, bound)
    return LayerCheck(
        layer=layer,
        format=experts.weights.format,
        experts=len(batch.experts),
        tokens=TOKENS,
        runtime_error=_beyond(plain, reference, bound),
        runtime_relative_error=_relative(plain, reference, bound),
        layer_error=_relative(plain, wanted, wanted_bound),
        activations=activations.scheme,
        quantized_activations_error=quantized_error,
        activations_not_measured=fitted.not_measured,
        input_std=fitted.factor,
        backend=served_by,
        device="cpu" if serving is None else str(serving.device),
        backend_error=served_error,
    )


def _serve(
    serving: Serving | None,
    activations: LayerActivations,
    batch: Batch,
    hidden: Tensor,
    bound: Tensor,
) -> tuple[str, float | None]:
    """The backend that serves a layer, and how far it is off from the CPU reference, if it ran."""
    own = activations.experts
    if own is None or serving is None:
        return REFERENCE, None
    routing = batch.topk_weights, batch.topk_ids
    name, served = serving.run(
        own.weights,
        hidden.bfloat16(),
        *routing,
        activations=activations.choice,
        expert_map=batch.expert_map,
    )
    exact = hidden.bfloat16().float()
    expected = own(exact, *routing, activations=activations.choice).double()
    return name, _relative(served, expected, bound)


def _beyond(found: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """The largest ratio of difference to bound, without elements that overflow in float32."""
    ratio = (found - wanted).abs() / bound
    return float(torch.where(bound.isinf(), 0.0, ratio).max())


def _relative(found: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """||found - wanted|| / ||wanted||, of elements that are larger than what float32 may be off.

    Others overflow or underflow in float32, whatever the weights are in, or are next to zero.
    """
    norm, sure = torch.linalg.vector_norm, wanted.abs() > bound
    return float(norm((found - wanted)[sure]) / norm(wanted[sure])) if sure.any() else 0.0
