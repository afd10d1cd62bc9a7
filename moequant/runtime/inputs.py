"""What a caller gives for a call of experts, checked before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.runtime.activations import QUANTIZED_DTYPE, scale_columns
from moequant.runtime.routing import ID_DTYPES, NOWHERE, WEIGHT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_inputs(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    hidden: int,
    device: torch.device,
    weight_on_input: bool,
    hidden_scale: Tensor | None = None,
    scheme: str = "none",
) -> None:
    """Check a call of experts of H = `hidden` columns on `device`; reads no values.

    Args:
        hidden_states: [M, H].
        topk_ids: [M, T].
        topk_weights: [M, T].
        hidden: H.
        device: of the experts.
        weight_on_input: whether the router's weight multiplies the input.
        hidden_scale: where hidden states come quantized, their scales.
        scheme: how the experts are fed, of `moequant.runtime.activations`.

    Raises:
        UnsupportedError: a dtype, shape or device that no backend takes; or router weights that
            multiply the input, and more than one of them a token.
    """
    _check_tensor("hidden_states", hidden_states)
    _check_quantized(hidden_states, hidden_scale, scheme)
    dtypes = HIDDEN_DTYPES if hidden_scale is None else (QUANTIZED_DTYPE,)
    _check("hidden_states", hidden_states, dtypes, f"[M, {hidden}]", 2, device)
    _check("topk_ids", topk_ids, ID_DTYPES, "[M, T]", 2, device)
    _check("topk_weights", topk_weights, WEIGHT_DTYPES, "[M, T]", 2, device)
    if hidden_states.shape[1] != hidden:
        raise UnsupportedError(
            f"hidden_states is {list(hidden_states.shape)}, but these experts want [M, {hidden}]"
        )
    if hidden_scale is not None:
        shape = [hidden_states.shape[0], scale_columns(scheme, hidden)]
        _check("hidden_scale", hidden_scale, (torch.float32,), f"{shape}", 2, device)
        if list(hidden_scale.shape) != shape:
            raise UnsupportedError(
                f"hidden_scale is {list(hidden_scale.shape)}, but for {scheme} and hidden_states "
                f"{list(hidden_states.shape)} wanted is {shape}"
            )
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != hidden_states.shape[0]:
        raise UnsupportedError(
            f"topk_ids is {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}, but "
            f"both want [M, T] for the M = {hidden_states.shape[0]} rows of hidden_states"
        )
    if weight_on_input and topk_ids.shape[1] != 1:
        raise UnsupportedError(
            "apply_router_weight_on_input wants one expert a token, but topk_ids is "
            f"{list(topk_ids.shape)}"
        )


def _check_quantized(hidden_states: Tensor, hidden_scale: Tensor | None, scheme: str) -> None:
    if hidden_scale is None and hidden_states.dtype == QUANTIZED_DTYPE:
        raise UnsupportedError(
            f"hidden_states is {hidden_states.dtype} and there is no hidden_scale; give its "
            "scales, or hidden states that are not quantized"
        )
    if hidden_scale is not None and scheme == "none":
        raise UnsupportedError(
            "hidden_scale is given, but these experts are fed activations that are not quantized; "
            "give hidden_states in bfloat16, float16 or float32, and no scale"
        )


def check_expert_map(
    expert_map: Tensor, *, experts: int, device: torch.device, values: bool
) -> None:
    """Check an expert_map of E = `experts` experts on `device`.

    Args:
        expert_map: [global experts].
        experts: E.
        device: of the experts.
        values: whether to look at the indices too, which waits for the device.

    Raises:
        UnsupportedError: another dtype, shape or device, or an index that is no expert's.
    """
    _check("expert_map", expert_map, ID_DTYPES, "[global experts]", 1, device)
    if not values:
        return
    unknown = (expert_map < NOWHERE) | (expert_map >= experts)
    if unknown.any():
        index = int(unknown.nonzero()[0])
        raise UnsupportedError(
            f"expert_map[{index}] is {int(expert_map[index])}, but the experts here are 0 to "
            f"{experts - 1}, and -1 stands for one that is elsewhere"
        )


def check_input_scales(scales: Mapping[str, Tensor]) -> None:
    """Check the values of static scales of activations, by name; waits for the device.

    An expert that calibration never reached may have 0: the largest counts for all.

    Raises:
        CheckpointError: one is negative or not finite, or the largest is not positive.
    """
    for name, scale in scales.items():
        wrong = ~((scale >= 0) & scale.isfinite() & (scale.amax() > 0))
        if wrong.any():
            index = int(wrong.nonzero()[0])
            raise CheckpointError(
                f"{name}[{index}] is {float(scale[index]):g}, but the largest must be positive, "
                "and all finite and not negative; calibrate again, or leave both scales out"
            )


def _check(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: str,
    dimensions: int,
    device: torch.device,
) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(dtype) for dtype in dtypes)
        raise UnsupportedError(f"{name} is {tensor.dtype}, but wanted is one of: {wanted}")
    if tensor.dim() != dimensions:
        raise UnsupportedError(f"{name} is {list(tensor.shape)}, but wanted is {shape}")
    if tensor.device != device:
        raise UnsupportedError(f"{name} is on {tensor.device}, but the experts are on {device}")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"{name} is {type(value).__name__}, but wanted is a tensor")
    if value.layout != torch.strided:
        raise UnsupportedError(f"{name} is {value.layout}, but wanted is a dense tensor")
