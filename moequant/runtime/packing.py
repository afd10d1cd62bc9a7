"""pack_experts(): weights to what a backend runs."""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, get_args

from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.runtime.activations import NVFP4, NVFP4_STATIC, ActivationsChoice
from moequant.runtime.backends import Workload
from moequant.runtime.inputs import check_input_scales
from moequant.runtime.kept_memory import make_kept
from moequant.runtime.select import select
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from moequant.runtime.backends import PackedExperts

ACTIVATIONS = get_args(ActivationsChoice)
"""What `FusedExperts` takes as `activations`."""


def pack_experts(
    weights: ExpertWeights,
    *,
    backend: str | None = None,
    activations: ActivationsChoice = "format",
) -> PackedExperts:
    """Pack weights for a backend, on the device they are on.

    Gate and up are copied into one tensor unless they are views of one already, as those of
    `load_experts` are; down is not copied unless the backend's layout permutes it.

    Args:
        weights: the experts here.
        backend: name of a backend; by default the best that runs them on their device.
        activations: see `FusedExperts`.

    Raises:
        UnsupportedError: no backend runs this, or the named one does not; says why.
        CheckpointError: static scales of activations that no scheme can use.
    """
    if not isinstance(weights, ExpertWeights):
        # Of FusedExperts, which this module cannot import.
        has_weights = isinstance(getattr(type(weights), "weights", None), property)
        next_step = (
            "pass its .weights" if has_weights else "pass .weights of what load_experts makes"
        )
        raise UnsupportedError(
            f"weights is {type(weights).__name__}, but must be ExpertWeights; {next_step}"
        )
    workload = workload_of(weights, activations)
    chosen = select(workload, backend)
    check_input_scales(weights.input_scales(), weights.format)
    return make_kept(lambda: chosen.load(chosen.pack(weights), workload), workload.device)


def workload_of(weights: ExpertWeights, activations: str) -> Workload:
    """What a backend is asked to run.

    Raises:
        UnsupportedError: `activations` is none of those that `FusedExperts` takes.
    """
    return Workload(
        format=weights.format,
        activations=scheme_of(weights.format, activations, static=bool(weights.input_scales())),
        experts=weights.experts,
        hidden=weights.hidden,
        intermediate=weights.intermediate,
        device=weights.device,
        act_fn=weights.act_fn,
        bias=bool(weights.biases()),
    )


def check_activations(activations: str) -> None:
    """Refuse activations that callers cannot ask for.

    Raises:
        UnsupportedError: they are none of ACTIVATIONS.
    """
    if not isinstance(activations, str) or activations not in ACTIVATIONS:
        raise UnsupportedError(
            f"activations is {show(activations)}, but must be one of: {', '.join(ACTIVATIONS)}"
        )


def scheme_of(format: str, activations: str, *, static: bool) -> str:
    """The scheme that "format" stands for, or the one that is named.

    Args:
        format: of the weights.
        activations: which.
        static: whether static scales of activations came with the weights.

    Raises:
        UnsupportedError: `activations` is none of these.
    """
    check_activations(activations)
    static_scheme = get_format(format).static_activations if static else None
    if activations == "format":
        return static_scheme or get_format(format).activations
    if activations == NVFP4 and static_scheme == NVFP4_STATIC:
        return static_scheme
    return activations
