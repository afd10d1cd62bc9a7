"""vLLM's activation functions of experts as ours.

Numbers of swigluoai and swiglustep: defaults of `swigluoai_and_mul` and `swiglustep_and_mul_triton`
in vLLM 0.22.1, which its own experts use.
"""

from __future__ import annotations

from moequant.act_fn import SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError

_NOT_GATED = "_no_mul"
_SWIGLUSTEP_LIMIT = 7.0
_GATED = {
    "silu": ActFn(name="silu"),
    "gelu": ActFn(name="gelu"),
    "gelu_tanh": ActFn(name="gelu_tanh"),
    "swigluoai": SWIGLUOAI,
    "swiglustep": ActFn(name="swiglustep", limit=_SWIGLUSTEP_LIMIT),
}
_PLAIN = {name: ActFn(name=name, gated=False) for name in ("silu", "gelu", "gelu_tanh", "relu2")}
_FUNCTIONS = _GATED | {name + _NOT_GATED: function for name, function in _PLAIN.items()}
INTERLEAVED = SWIGLUOAI
"""The function for which vLLM's kernels read rows of gate and up in turns."""


def act_fn_of(name: str, limit: float | None) -> ActFn:
    """The function that vLLM calls `name`, the value of a `MoEActivation`.

    Args:
        name: silu, gelu_tanh_no_mul and so on.
        limit: `swiglu_limit` of the layer, a bound of gate and up.

    Raises:
        UnsupportedError: vLLM has no function of that name for experts, or no limit for it.
    """
    if name not in _FUNCTIONS:
        raise UnsupportedError(
            f"activation function {name!r} of vLLM, but moequant knows {', '.join(_FUNCTIONS)}; "
            "start without --quantization moequant"
        )
    function = _FUNCTIONS[name]
    if limit is None or limit == function.limit:
        return function
    if function != _GATED["silu"]:
        raise UnsupportedError(
            f"activation function {name!r} with swiglu_limit {limit:g}, but in vLLM only silu has "
            "one of the model's; start without --quantization moequant"
        )
    return ActFn(name="silu", limit=limit)
