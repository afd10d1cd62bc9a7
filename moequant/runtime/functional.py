"""The experts of a layer in one call, without a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.act_fn import SILU, ActFn
from moequant.errors import UnsupportedError
from moequant.formats import check_specs, get_format
from moequant.runtime.backends import REGISTRY, PackedExperts, Workload
from moequant.runtime.call import run_experts
from moequant.runtime.inputs import check_expert_map, check_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def fused_experts(
    hidden_states: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    hidden_scale: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run packed experts; see `FusedExperts.forward`, also for arguments, result and errors.

    Unlike there, indices in `expert_map` are not read: one that is no expert's contributes nothing.

    Args:
        hidden_states: [M, H].
        experts: what `pack_experts` made.
        topk_weights: [M, T].
        topk_ids: [M, T].
        expert_map: [global experts].
        apply_router_weight_on_input: for T = 1 only.
        hidden_scale: of hidden states that come quantized.
        out: where to write the result.
        workspace: scratch memory.

    Raises:
        UnsupportedError: `experts` is not packed; or as `FusedExperts.forward`.
    """
    if not isinstance(experts, PackedExperts):
        raise UnsupportedError(
            f"experts is {type(experts).__name__}, but must be PackedExperts; pack_experts makes "
            "them of ExpertWeights"
        )
    if expert_map is not None:
        check_expert_map(
            expert_map,
            experts=experts.workload.experts,
            device=experts.workload.device,
            values=False,
        )
    return run_experts(
        experts,
        hidden_states,
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        weight_on_input=apply_router_weight_on_input,
        hidden_scale=hidden_scale,
        out=out,
        workspace=workspace,
    )


def deep_gemm_moe_fp8(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    act_fn: ActFn = SILU,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    """Run FP8-block experts through DeepGEMM, whose package deep_gemm must be installed.

    What is not described here is as for `FusedExperts.forward`. Nothing is read on the host: an id
    or an index in `expert_map` that is out of range contributes nothing, like -1.

    Args:
        hidden_states: [M, H]; H and I multiples of 16.
        w13: float8_e4m3fn [E, 2 * Ip, H], gate over up, Ip = I rounded up to a multiple of 128 with
            rows of zeros; [E, Ip, H] where `act_fn` is not gated.
        w2: float8_e4m3fn [E, H, I].
        w13_scale: float32 [E, rows of w13 / 128, ceil(H / 128)], multipliers.
        w2_scale: float32 [E, ceil(H / 128), ceil(I / 128)], multipliers.
        topk_weights: [M, T].
        topk_ids: [M, T].
        act_fn: the function between the GEMMs.
        expert_map: [global experts].
        apply_router_weight_on_input: for T = 1 only.
        hidden_scale: of hidden states that come quantized, float32 [M, ceil(H / 128)].

    Raises:
        UnsupportedError: sizes, a function, a device or an installation that it cannot run with,
            weights on several devices; or as `FusedExperts.forward`.
        CheckpointError: weights or scales of another shape or dtype.
    """
    check_weights({"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale})
    workload = _workload(w13, w2, act_fn)
    backend = REGISTRY["deepgemm"]
    reason = backend.supports(workload)
    if reason is not None:
        raise UnsupportedError(
            f"deep_gemm_moe_fp8 {reason}; pack_experts packs weights for a backend that runs "
            "here, and fused_experts runs them"
        )
    E, H = workload.experts, workload.hidden
    check_weight({"w13": w13, "w13_scale": w13_scale}, "fp8_block", (E, w13.shape[1], H))
    check_weight({"w2": w2, "w2_scale": w2_scale}, "fp8_block", (E, H, workload.intermediate))
    tensors = {
        "w13_qdata": w13.contiguous(),
        "w13_scale": w13_scale.contiguous(),
        "w2_qdata": w2.contiguous(),
        "w2_scale": w2_scale.contiguous(),
    }
    return fused_experts(
        hidden_states,
        backend.load(tensors, workload),
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
        hidden_scale=hidden_scale,
    )


def check_weights(
    needed: Mapping[str, Tensor], optional: Mapping[str, Tensor | None] | None = None
) -> None:
    """Check that weights are tensors on one device, because kernels only get their addresses.

    Args:
        needed: weights, scales and biases by argument, on the device of the first.
        optional: those that may be None.

    Raises:
        UnsupportedError: one is no tensor or on another device; the message names it.
    """
    given = {n: t for n, t in (optional or {}).items() if t is not None}
    device = None
    for name, tensor in {**needed, **given}.items():
        check_tensor(name, tensor)
        device = device or tensor.device
        if tensor.device != device:
            raise UnsupportedError(
                f"{name} is on {tensor.device}, but the first weight is on {device}; move it there"
            )


def check_weight(arguments: Mapping[str, Tensor], format: str, shape: tuple[int, ...]) -> None:
    """Check the dtypes and shapes of a weight [E, N, K] of a format without global scales.

    Args:
        arguments: its codes and its scales, by argument.
        format: its name.
        shape: [E, N, K].

    Raises:
        CheckpointError: one has another dtype or shape; the message names the argument.
        UnsupportedError: the format has no weights of that shape.
    """
    codes, scale = arguments
    specs = get_format(format).specs(shape, codes)
    check_specs(
        arguments,
        {codes: specs["qdata"], scale: specs["scale"]},
        advice=f"give {codes} and {scale} as moequant.formats.quantize makes {format}",
    )


def check_act_fn(act_fn: ActFn) -> None:
    """Check that the runtime computes an activation function.

    Raises:
        UnsupportedError: it does not, or `act_fn` is no ActFn, such as a name.
    """
    if not isinstance(act_fn, ActFn):
        raise UnsupportedError(
            f"the activation function is {act_fn!r}, but must be a moequant.act_fn.ActFn; use one "
            "of that module, such as SILU"
        )
    act_fn.check()


def _workload(w13: Tensor, w2: Tensor, act_fn: ActFn) -> Workload:
    check_act_fn(act_fn)
    halves = 2 if act_fn.gated else 1
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[1] != -(-w2.shape[2] // 128) * 128 * halves:
        raise UnsupportedError(
            f"w13 is {list(w13.shape)} and w2 {list(w2.shape)}, but must be "
            f"[E, {'2 * ' if act_fn.gated else ''}Ip, H] and [E, H, I], Ip the next multiple of "
            "128 from I on; pack_experts pads"
        )
    return Workload(
        format="fp8_block",
        activations="fp8_group128",
        experts=w13.shape[0],
        hidden=w13.shape[2],
        intermediate=w2.shape[2],
        device=w13.device,
        act_fn=act_fn,
    )
