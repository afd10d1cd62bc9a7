"""What a caller gives for a call of experts, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.arguments import check_argument, check_flag, check_tensor
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import get_format
from moequant.runtime.activations import (
    FP8_SCHEMES,
    NVFP4_STATIC,
    QUANTIZED_DTYPE,
    scale_columns,
)
from moequant.runtime.block_scaled import LARGEST_GLOBAL_SCALE, LEAST_GLOBAL_SCALE
from moequant.runtime.routing import ID_DTYPES, NOWHERE, WEIGHT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.runtime.workload import Workload

HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED_DTYPES = (QUANTIZED_DTYPE,)
WORKSPACE_ALIGNMENT = 16
"""Bytes, as TMA and vectorized loads need it."""


@dataclass(frozen=True, kw_only=True)
class ArgumentNames:
    """What the function that was called names the arguments of a call, for messages."""

    hidden_states: str = "hidden_states"
    hidden_scale: str = "hidden_scale"
    out: str = "out"


NAMES = ArgumentNames()
"""Those of `FusedExperts.forward`."""


def check_inputs(
    workload: Workload,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    weight_on_input: bool,
    hidden_scale: Tensor | None = None,
    names: ArgumentNames = NAMES,
) -> None:
    """Check the arguments of a call, see `FusedExperts.forward`; reads no values.

    Raises:
        UnsupportedError: a dtype, shape or device that no backend takes; router weights that
            multiply the input, and more than one of them a token; or `weight_on_input` is no bool.
    """
    check_flag("apply_router_weight_on_input", weight_on_input)
    hidden, device = workload.hidden, workload.device
    check_tensor(names.hidden_states, hidden_states)
    _check_quantized(hidden_states, hidden_scale, workload.activations, names)
    dtypes = HIDDEN_DTYPES if hidden_scale is None else QUANTIZED_DTYPES
    check_argument(names.hidden_states, hidden_states, dtypes, "[M, H]", device)
    check_argument("topk_weights", topk_weights, WEIGHT_DTYPES, "[M, T]", device)
    check_argument("topk_ids", topk_ids, ID_DTYPES, "[M, T]", device)
    tokens, columns = hidden_states.shape
    if columns != hidden:
        raise UnsupportedError(
            f"{names.hidden_states} is {list(hidden_states.shape)}, but these experts need "
            f"[M, {hidden}]"
        )
    if hidden_scale is not None:
        check_argument(names.hidden_scale, hidden_scale, (torch.float32,), "[M, groups]", device)
        shape = [tokens, scale_columns(workload.activations, hidden)]
        if list(hidden_scale.shape) != shape:
            raise UnsupportedError(
                f"{names.hidden_scale} is {list(hidden_scale.shape)}, but for "
                f"{workload.activations} and {names.hidden_states} {list(hidden_states.shape)} it "
                f"must be {shape}"
            )
    shape_of_ids = topk_ids.shape
    if shape_of_ids != topk_weights.shape or shape_of_ids[0] != tokens:
        raise UnsupportedError(
            f"topk_weights is {list(topk_weights.shape)} and topk_ids {list(shape_of_ids)}, but "
            f"both must be [M, T] for the M = {tokens} rows of {names.hidden_states}"
        )
    if weight_on_input and shape_of_ids[1] != 1:
        raise UnsupportedError(
            "apply_router_weight_on_input needs one expert per token, but topk_ids is "
            f"{list(shape_of_ids)}"
        )


def check_out(
    out: Tensor,
    hidden_states: Tensor,
    hidden_scale: Tensor | None,
    names: ArgumentNames = NAMES,
) -> None:
    """Check the tensor that a caller gives for the output.

    Raises:
        UnsupportedError: it is not contiguous, or has another shape, dtype or device than the
            output.
    """
    dtype = hidden_states.dtype if hidden_scale is None else torch.bfloat16
    check_argument(names.out, out, (dtype,), "[M, H]", hidden_states.device)
    if out.shape != hidden_states.shape or not out.is_contiguous():
        raise UnsupportedError(
            f"{names.out} is {list(out.shape)} with strides {list(out.stride())}, but must be a "
            f"contiguous {list(hidden_states.shape)}"
        )


def check_apart(out: Tensor, others: Sequence[Tensor | None], names: ArgumentNames = NAMES) -> None:
    """Check that a call does not write its result over what it reads; reads no values.

    Kernels read some tokens when they have written others. It takes a microsecond, and half of one
    more for each argument that is not contiguous.

    Args:
        out: contiguous, as `check_out` says.
        others: hidden states, router weights, ids, their scale or None, expert_map or None, and
            workspace, in this order.
        names: for messages.

    Raises:
        UnsupportedError: the bytes from the first to the last element of one overlap those of
            `out`.
    """
    start = out.data_ptr()
    stop = start + out.nbytes
    if start in (0, stop):  # "meta" has no addresses
        return
    for position, tensor in enumerate(others):
        if tensor is None:
            continue
        first = tensor.data_ptr()
        if first < stop and start < first + _extent_bytes(tensor):
            known = (names.hidden_states, "topk_weights", "topk_ids", names.hidden_scale)
            name = (*known, "expert_map", "workspace")[position]
            raise UnsupportedError(
                f"{names.out} is at {start:#x} to {stop:#x}, where {name} is too, from {first:#x}, "
                "but must have memory that no other argument has; give a tensor of its own"
            )


def _extent_bytes(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * stride for extent, stride in strides)
    return tensor.itemsize * (last + 1) if tensor.numel() else 0


def check_workspace(workspace: Tensor, size_bytes: int, device: torch.device) -> None:
    """Check the scratch memory that a caller gives.

    Raises:
        UnsupportedError: it is too small, not contiguous, not aligned to 16 bytes, or of another
            dtype or device.
    """
    check_argument("workspace", workspace, (torch.uint8,), "[bytes]", device)
    if (
        workspace.numel() < size_bytes
        or not workspace.is_contiguous()
        or workspace.data_ptr() % WORKSPACE_ALIGNMENT
    ):
        raise UnsupportedError(
            f"workspace has {workspace.numel()} bytes, strides {list(workspace.stride())} and "
            f"address {workspace.data_ptr():#x}, but must be a contiguous tensor of at least "
            f"{size_bytes} bytes at a multiple of {WORKSPACE_ALIGNMENT}; ask workspace_bytes"
        )


def _check_quantized(
    hidden_states: Tensor, hidden_scale: Tensor | None, scheme: str, names: ArgumentNames
) -> None:
    x, scale = names.hidden_states, names.hidden_scale
    if hidden_scale is None and hidden_states.dtype == QUANTIZED_DTYPE:
        raise UnsupportedError(
            f"{x} is {hidden_states.dtype} and there is no {scale}; give its scales, or hidden "
            "states that are not quantized"
        )
    if hidden_scale is None:
        return
    if scheme in FP8_SCHEMES:
        if hidden_states.dtype in HIDDEN_DTYPES:
            raise UnsupportedError(
                f"{scale} is given, but {x} is {hidden_states.dtype}; leave {scale} out, or give "
                f"{x} in {QUANTIZED_DTYPE}"
            )
        return
    found = "take activations that are not quantized"
    if scheme != "none":
        found = f"quantize hidden states to {scheme} themselves"
    raise UnsupportedError(
        f"{scale} is given, but these experts {found}; give {x} in bfloat16, float16 or float32, "
        "and no scale"
    )


def check_expert_map(
    expert_map: Tensor, *, experts: int, device: torch.device, values: bool
) -> None:
    """Check an expert_map of `experts` experts on `device`; with `values`, wait for its indices.

    Raises:
        UnsupportedError: another dtype, shape or device, or an index that is no expert's.
    """
    check_argument("expert_map", expert_map, ID_DTYPES, "[global experts]", device)
    if not values:
        return
    unknown = (expert_map < NOWHERE) | (expert_map >= experts)
    if unknown.any():
        index = int(unknown.nonzero()[0])
        raise UnsupportedError(
            f"expert_map[{index}] is {int(expert_map[index])}, but the experts here are 0 to "
            f"{experts - 1}, and -1 is for an expert elsewhere"
        )


def check_input_scales(scales: Mapping[str, Tensor], format: str) -> None:
    """Check the values of static scales of activations, by name; waits for the device.

    Of fp8_tensor, an expert that calibration never reached may have 0: the largest counts for all.
    Of nvfp4, each counts.

    Raises:
        CheckpointError: of fp8_tensor, one is negative or not finite, or the largest is not
            positive; of nvfp4, one is not from LEAST_GLOBAL_SCALE to LARGEST_GLOBAL_SCALE.
    """
    for name, scale in scales.items():
        if get_format(format).static_activations == NVFP4_STATIC:
            wrong = ~((scale >= LEAST_GLOBAL_SCALE) & (scale <= LARGEST_GLOBAL_SCALE))
            wanted = f"each must be from {LEAST_GLOBAL_SCALE:g} to {LARGEST_GLOBAL_SCALE:g}"
        else:
            wrong = ~((scale >= 0) & scale.isfinite() & (scale.amax() > 0))
            wanted = "the largest must be positive, and all finite and not negative"
        if wrong.any():
            index = int(wrong.nonzero()[0])
            raise CheckpointError(
                f"{name}[{index}] is {float(scale[index]):g}, but {wanted}; calibrate again, or "
                "leave both scales out"
            )
