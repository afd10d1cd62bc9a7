"""vLLM's activation functions of experts as ours.

Numbers of swigluoai and swiglustep: defaults of `swigluoai_and_mul` and `swiglustep_and_mul_triton`
in vLLM, which its own experts use. What other numbers mean: `ApplyMoEActivationConfig` and
`apply_moe_activation` in vLLM 0.33.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.act_fn import SILU, SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Numbers = Mapping[str, float | None]

_NOT_GATED = "_no_mul"
_SWIGLUSTEP_LIMIT = 7.0
_GATED = {
    "silu": SILU,
    "gelu": ActFn(name="gelu"),
    "gelu_tanh": ActFn(name="gelu_tanh"),
    "swigluoai": SWIGLUOAI,
    "swiglustep": ActFn(name="swiglustep", limit=_SWIGLUSTEP_LIMIT),
}
_PLAIN = {name: ActFn(name=name, gated=False) for name in ("silu", "gelu", "gelu_tanh", "relu2")}
_FIXED = _GATED | {name + _NOT_GATED: function for name, function in _PLAIN.items()}
"""Functions whose numbers are vLLM's; only silu may get a limit of the model's."""


def _swigluoai(numbers: Numbers) -> ActFn:
    return ActFn(
        name="swigluoai",
        limit=numbers.get("swiglu_limit"),
        alpha=_or(numbers.get("swiglu_alpha"), 1.0),
        beta=_or(numbers.get("swiglu_beta"), 0.0),
    )


def _situ(numbers: Numbers) -> ActFn:
    beta = numbers.get("activation_situ_beta")
    linear_beta = numbers.get("activation_situ_linear_beta")
    if beta is None:
        raise UnsupportedError(
            "activation function 'situ' without activation_situ_beta, which config.json of the "
            "model must give"
        )
    # For vLLM a bound that is not positive is none.
    bound = None if linear_beta is None or linear_beta <= 0 else linear_beta
    return ActFn(name="situ", beta=beta, linear_beta=bound)


_OF_THE_MODEL: dict[str, Callable[[Numbers], ActFn]] = {
    "swigluoai_uninterleave": _swigluoai,
    "situ": _situ,
}
"""Functions whose numbers are the model's."""
INTERLEAVED = "swigluoai"
"""The function for which vLLM's kernels read rows of gate and up in turns."""


def act_fn_named(name: str, numbers: Numbers) -> ActFn:
    """The function that vLLM calls `name`, the value of a `MoEActivation`.

    Args:
        name: silu, gelu_tanh_no_mul and so on.
        numbers: of the layer, by field of vLLM's `FusedMoEConfig`; None for its default.

    Raises:
        UnsupportedError: vLLM has no function of that name for experts, or not with these numbers.
    """
    if name in _OF_THE_MODEL:
        return _OF_THE_MODEL[name](numbers)
    if name not in _FIXED:
        known = ", ".join((*_FIXED, *_OF_THE_MODEL))
        raise UnsupportedError(
            f"activation function {name!r} of vLLM, but moequant knows {known}; "
            "start without --quantization moequant"
        )
    function, limit = _FIXED[name], numbers.get("swiglu_limit")
    if limit is None or limit == function.limit:
        return function
    if function != SILU:
        raise UnsupportedError(
            f"activation function {name!r} with swiglu_limit {limit:g}, but in vLLM only silu has "
            "one of the model's; start without --quantization moequant"
        )
    return ActFn(name="silu", limit=limit)


def _or(number: float | None, default: float) -> float:
    return default if number is None else number
