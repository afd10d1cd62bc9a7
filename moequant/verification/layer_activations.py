"""What engines quantize the activations of a layer by, and inputs that fit it.

The inputs of a run are random, and static scales are those of the model's own inputs. So hidden
states are made smaller, by a power of two, until neither they nor the inputs of down leave the
range of their scale, as the model's did not when it was calibrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import MoequantError
from moequant.formats import STATIC_SCHEMES, get_format
from moequant.runtime import FusedExperts
from moequant.runtime.activations import MXFP4
from moequant.runtime.packing import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from moequant.runtime.activations import ActivationsChoice
    from moequant.weights.converted import ConvertedCheckpoint

MOST_HALVINGS = 32
"""Smaller inputs than 2**-32 times N(0, 1) are none that a model has."""
MOST_EVALUATIONS = 4
"""How often a layer is evaluated to find inputs within the range of its scales."""


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """How the activations of a layer's experts are quantized.

    Attributes:
        choice: what `FusedExperts` is asked for.
        scheme: what that stands for; one of `moequant.runtime.activations.SCHEMES`.
        experts: the experts, with static scales if the scheme needs them; None if they cannot be
            had.
        hidden_range: the largest magnitude of hidden states that static scales hold; infinite
            without.
        down_range: the same, of inputs of down.
        not_measured: why a layer cannot be run so; None if it can.
    """

    choice: ActivationsChoice
    scheme: str
    experts: FusedExperts | None
    hidden_range: float = math.inf
    down_range: float = math.inf
    not_measured: str | None = None


def read_activations(
    converted: ConvertedCheckpoint,
    layer: int,
    experts: FusedExperts,
    ids: Sequence[int],
) -> LayerActivations:
    """What a layer's activations are quantized by.

    Args:
        converted: the checkpoint, whose `activations_of` says what config.json says.
        layer: its index.
        experts: some of its experts, without static scales.
        ids: which these are.
    """
    weights = experts.weights
    format = get_format(weights.format)
    scheme = scheme_of(format.name, "format", static=False)
    try:
        stated = converted.activations_of_experts(layer)
        choice: ActivationsChoice = MXFP4 if stated == MXFP4 else "format"
        scheme = stated or scheme
        scales = {}
        if stated in STATIC_SCHEMES:
            scales = _static_scales(converted, layer, ids, format.name)
            experts = FusedExperts(
                weights.with_input_scales(scales),
                backend=experts.backend,
                expert_map=experts.expert_map,
            )
    except MoequantError as error:
        return LayerActivations(
            choice="format", scheme=scheme, experts=None, not_measured=str(error)
        )
    ranges = {name: scale.min().item() * format.static_largest for name, scale in scales.items()}
    return LayerActivations(
        choice=choice,
        scheme=scheme,
        experts=experts,
        hidden_range=ranges.get("gate_up_input_scale", math.inf),
        down_range=ranges.get("down_input_scale", math.inf),
    )


def _static_scales(
    converted: ConvertedCheckpoint, layer: int, ids: Sequence[int], format: str
) -> dict[str, Tensor]:
    """By field of `ExpertWeights`; where the largest of the layer counts, it is of all experts."""
    scales = converted.read_input_scales(layer, range(converted.moe.experts))
    stored = converted.dialect.input_scale(format)
    assert stored is not None, format
    if stored.of_layer:
        return {name: scale.amax(0, keepdim=True) for name, scale in scales.items()}
    return {name: scale[list(ids)] for name, scale in scales.items()}


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Hidden states within the range of a layer's static scales.

    Attributes:
        hidden: [M, H] float32.
        factor: what they were multiplied by, a power of two, at most 1.
        reference: the layer's output for them, [M, H] float64.
        bound: its bound, see `evaluate_layer`.
        not_measured: why they leave the range all the same; None if they do not.
    """

    hidden: Tensor
    factor: float
    reference: Tensor
    bound: Tensor
    not_measured: str | None


def fit(
    hidden: Tensor,
    activations: LayerActivations,
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor, float]],
) -> Fitted:
    """Make hidden states small enough for the static scales of a layer.

    Args:
        hidden: [M, H] float32, finite.
        activations: of the layer.
        evaluate: gives output, bound and largest magnitude of the inputs of down for hidden states.
    """
    halvings = _halvings(hidden.abs().max().item(), activations.hidden_range)
    for _ in range(MOST_EVALUATIONS):
        factor = 2.0 ** -min(halvings, MOST_HALVINGS)
        scaled = hidden * factor
        reference, bound, reach = evaluate(scaled)
        more = _halvings(reach, activations.down_range)
        if not more or halvings >= MOST_HALVINGS:
            break
        halvings += more
    why = activations.not_measured
    if why is None and (more or halvings > MOST_HALVINGS):
        why = (
            f"the static scales of activations hold hidden states up to "
            f"{activations.hidden_range:.3g} and inputs of down up to "
            f"{activations.down_range:.3g}, and random inputs exceed one of these even when "
            "made smaller"
        )
    return Fitted(hidden=scaled, factor=factor, reference=reference, bound=bound, not_measured=why)


def _halvings(reach: float, limit: float) -> int:
    """How often `reach` is halved until it is `limit` at most."""
    if not (math.isfinite(reach) and reach > limit):
        return 0
    return math.ceil(math.log2(reach / limit)) if limit > 0 else MOST_HALVINGS + 1
