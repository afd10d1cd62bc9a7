"""The experts of a layer in one call, without a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.act_fn import SILU, ActFn
from moequant.arguments import check_tensor
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import check_specs, dtype_text, get_format
from moequant.runtime.backends import REGISTRY, PackedExperts, Workload
from moequant.runtime.backends.stacked import padded_rows
from moequant.runtime.call import run_experts
from moequant.runtime.inputs import check_expert_map
from moequant.runtime.weights import weights_without_data

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.backends import Layout


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
    workload = workload_of_tensors(
        {"w13": w13, "w2": w2}, act_fn, format="fp8_block", activations="fp8_group128"
    )
    backend = REGISTRY["deepgemm"]
    reason = backend.supports(workload)
    if reason is not None:
        raise UnsupportedError(
            f"deep_gemm_moe_fp8 {reason}; pack_experts packs weights for a backend that runs "
            "here, and fused_experts runs them"
        )
    weights = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    tensors = stacked_tensors(weights, workload)
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


def workload_of_tensors(
    weights: Mapping[str, Tensor], act_fn: ActFn, *, format: str, activations: str, packed: int = 1
) -> Workload:
    """What is asked for, from the weights of both GEMMs.

    Args:
        weights: by argument, in this order: [E, 2 * Ip, H / packed], gate over up, where Ip is
            `padded_rows(format, I)`, or [E, Ip, H / packed] where `act_fn` has no gate; and
            [E, H, I / packed].
        act_fn: see `Workload`.
        format: likewise.
        activations: likewise.
        packed: columns a byte.

    Raises:
        UnsupportedError: weights of other shapes; or as `check_act_fn`.
    """
    check_act_fn(act_fn)
    (first, w13), (second, w2) = weights.items()
    halves = 2 if act_fn.gated else 1
    if not (
        w13.dim() == w2.dim() == 3
        and w13.shape[1] == halves * padded_rows(format, w2.shape[2] * packed)
    ):
        block = padded_rows(format, 1)
        pads = f", Ip the next multiple of {block} from I on; pack_experts pads"
        I, advice = ("Ip", pads) if block > 1 else ("I", "")
        per_byte = f" / {packed}" if packed > 1 else ""
        raise UnsupportedError(
            f"{first} is {list(w13.shape)} and {second} {list(w2.shape)}, but with {act_fn} they "
            f"must be [E, {'2 * ' if act_fn.gated else ''}{I}, H{per_byte}] and "
            f"[E, H, I{per_byte}]{advice}"
        )
    return Workload(
        format=format,
        activations=activations,
        experts=w13.shape[0],
        hidden=w13.shape[2] * packed,
        intermediate=w2.shape[2] * packed,
        device=w13.device,
        act_fn=act_fn,
    )


def stacked_tensors(weights: Mapping[str, Tensor], workload: Workload) -> dict[str, Tensor]:
    """Check weights of a format without global scales, and name them as the layout `stacked`.

    Args:
        weights: by argument, in this order: codes and scales of the first GEMM, then those of the
            second.
        workload: as `workload_of_tensors` made it of the codes.

    Raises:
        CheckpointError: one has another dtype or shape; the message names the argument.
        UnsupportedError: the format has no weights of that shape.
    """
    format, E, H = workload.format, workload.experts, workload.hidden
    w13, w13_scale, w2, w2_scale = weights
    rows = weights[w13].shape[1]
    for codes, scale, shape in (
        (w13, w13_scale, (E, rows, H)),
        (w2, w2_scale, (E, H, workload.intermediate)),
    ):
        specs = get_format(format).specs(shape, codes)
        check_specs(
            {codes: weights[codes], scale: weights[scale]},
            {codes: specs["qdata"], scale: specs["scale"]},
            advice=f"give {codes} and {scale} as moequant.formats.quantize makes {format}",
        )
    names = ("w13_qdata", "w13_scale", "w2_qdata", "w2_scale")
    return dict(zip(names, (part.contiguous() for part in weights.values()), strict=True))


def check_packed(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    workload: Workload,
    *,
    arguments: Mapping[str, str],
    advice: Mapping[str, str],
) -> None:
    """Check shapes and dtypes against those that a layout makes of such weights.

    Args:
        layout: which.
        tensors: by the layout's names; static scales of activations count if they are there.
        workload: the sizes.
        arguments: what the caller calls each tensor.
        advice: by the layout's names, what to do where one is another.

    Raises:
        CheckpointError: one has another dtype or shape; the message names the argument.
    """
    E, I, H = workload.experts, workload.intermediate, workload.hidden
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    if not workload.act_fn.gated:
        del shapes["gate"]
    static = "w13_input_scale" in tensors
    like = weights_without_data(workload.format, shapes, workload.act_fn, static=static)
    for name, needed in layout.pack(like).items():
        found = tensors[name]
        if found.shape != needed.shape or found.dtype != needed.dtype:
            raise CheckpointError(
                f"{arguments[name]} is {dtype_text(found.dtype)} {list(found.shape)}, but for "
                f"E {E}, H {H} and I {I} it must be {dtype_text(needed.dtype)} "
                f"{list(needed.shape)}; {advice[name]}"
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
