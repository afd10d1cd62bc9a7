"""vLLM's functions around its CUTLASS kernels, on the backends here.

Names, order and meaning of arguments are those of vLLM 0.33.0's `cutlass_moe.py`. Left out is what
only CUTLASS needs: strides, workspaces, and the dtype of the output, which is that of `output` or
of the hidden states. Nothing is read on the host, but by backends that say so. A call makes what
`pack_experts` makes once; where calls repeat eagerly, `pack_experts` and `fused_experts` spend less
time on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.act_fn import SILU, ActFn
from moequant.arguments import check_flag, check_tensor, whole_number
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dtype_text, get_format
from moequant.formats.w4a8 import GROUP
from moequant.runtime.activations import FP8_TENSOR
from moequant.runtime.backends import REGISTRY, STACKED, BatchedExperts, Workload
from moequant.runtime.batched import BatchedTokens
from moequant.runtime.call import run_experts
from moequant.runtime.capture import plain_mode
from moequant.runtime.functional import (
    check_act_fn,
    check_packed,
    check_weights,
    stacked_tensors,
    workload_of_tensors,
)
from moequant.runtime.inputs import HIDDEN_DTYPES, ArgumentNames, check_expert_map
from moequant.runtime.no_gradient import refuse_gradient
from moequant.runtime.select import select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_BATCHED = {"cuda": "triton_batched", "cpu": "naive_batched"}
_PANELS = {"w13_panels": "w1_q", "w2_panels": "w2_q"}
"""The layout's panels, and what they are called here."""
_BATCH_NAMES = {"qdata": "hidden_states", "scale": "a1q_scale", "counts": "expert_num_tokens"}


def run_cutlass_moe_fp8(
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_ids: Tensor | None,
    activation: ActFn,
    global_num_experts: int,
    expert_map: Tensor | None,
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1q_scale: Tensor | None,
    a2_scale: Tensor | None,
    *,
    expert_num_tokens: Tensor | None = None,
    per_act_token: bool,
    per_out_ch: bool,
    use_batched_format: bool = False,
    topk_weights: Tensor | None,
    backend: str | None = None,
) -> Tensor:
    """Run FP8 experts with a scale per output channel or per matrix, as vLLM's CutlassExpertsFp8.

    Unlike there, hidden states may also come as they are, and functions need no gate. With one
    dynamic scale of all tokens ("fp8_tensor" in `moequant.runtime.activations`), the second GEMM's
    is that of the rows which the first computed. vLLM's is that of its whole buffer: rows of no
    expert are 0 there with an expert map or in batches, and what memory held for ids of -1.

    Args:
        output: [M, H], written; in batches [E, C, H], of which rows beyond the counts are not
            defined.
        hidden_states: [M, H] float8_e4m3fn with `a1q_scale`, or of the dtype of `output` without;
            in batches [E, C, H] float8_e4m3fn.
        w1: float8_e4m3fn [E, 2 * I, H], gate over up; [E, I, H] where `activation` has no gate.
        w2: float8_e4m3fn [E, H, I].
        topk_ids: [M, T]; not read in batches.
        activation: the function between the GEMMs.
        global_num_experts: length of `expert_map`, else E; or -1 for either.
        expert_map: [global experts] index here or -1; None in batches.
        w1_scale: float32 multipliers: with `per_out_ch` [E, rows] or [E, rows, 1], else one of each
            expert, [E], [E, 1] or [E, 1, 1].
        w2_scale: likewise.
        a1q_scale: float32 scale of the hidden states: with `per_act_token` [M, 1], in batches
            [E, C, 1]; else one value, or in batches with dynamic scales [E, 1, 1]. With an
            `a2_scale` it must be given, also to quantize by, positive and finite: checked on a CPU,
            because on a GPU the host would wait for it. Without, it must be given with hidden
            states that are quantized, and only with them.
        a2_scale: without `per_act_token` the static scale of the second GEMM's input, likewise;
            None, and the scales are computed.
        expert_num_tokens: in batches, int32 [E], how many rows of each expert are tokens.
        per_act_token: whether activations have a scale per token; else one of all tokens: computed,
            or static, which needs weights with a scale per matrix.
        per_out_ch: whether weights have a scale per output channel.
        use_batched_format: whether `hidden_states` come in a batch for each expert.
        topk_weights: [M, T]; not read in batches, which are not weighted.
        backend: name of one that reads weights as they are on disk, such as "cutlass_fp8", in
            batches of a batched one; by default the best here, in batches triton_batched, or
            naive_batched on a CPU.

    Returns:
        `output`.

    Raises:
        UnsupportedError: scales that do not go together, a static one that is not positive and
            finite, weights on several devices, an argument that is no tensor, no backend that
            runs this, or as `FusedExperts.forward`.
        CheckpointError: weights or scales of another shape or dtype.
    """
    check_flag("per_act_token", per_act_token)
    check_flag("per_out_ch", per_out_ch)
    check_flag("use_batched_format", use_batched_format)
    check_tensor("hidden_states", hidden_states)
    quantized = hidden_states.dtype == torch.float8_e4m3fn
    scheme = _scheme(
        a1q_scale,
        a2_scale,
        per_act_token=per_act_token,
        per_out_ch=per_out_ch,
        quantized=quantized,
    )
    format = "fp8_channel" if per_out_ch else "fp8_tensor"
    check_tensor("output", output)
    check_weights(
        {"w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale},
        {"a1q_scale": a1q_scale, "a2_scale": a2_scale},
    )
    workload = workload_of_tensors(
        {"w1": w1, "w2": w2}, activation, format=format, activations=scheme
    )
    tensors = _fp8_tensors(workload, w1, w2, w1_scale, w2_scale)
    if scheme == "fp8_static":
        assert a1q_scale is not None
        assert a2_scale is not None
        tensors["w13_input_scale"] = _static(a1q_scale, "a1q_scale")
        tensors["w2_input_scale"] = _static(a2_scale, "a2_scale")
    if quantized and scheme == "fp8_static":
        a1q_scale = _of_rows(tensors["w13_input_scale"], hidden_states)
    elif quantized and scheme == FP8_TENSOR and a1q_scale is not None:
        a1q_scale = _of_rows(_dynamic(a1q_scale, hidden_states), hidden_states)
    if use_batched_format:
        if expert_map is not None:
            raise UnsupportedError(
                "expert_map is given, but batches are of the experts here; leave it out"
            )
        _check_global(global_num_experts, None, workload)
        return _run_batches(
            output,
            hidden_states,
            a1q_scale,
            tensors,
            workload,
            counts=expert_num_tokens,
            backend=backend,
        )
    if expert_num_tokens is not None or topk_ids is None or topk_weights is None:
        raise UnsupportedError(
            "without use_batched_format, topk_ids and topk_weights are needed, and no "
            "expert_num_tokens"
        )
    _check_global(global_num_experts, expert_map, workload)
    return run_experts(
        select(workload, backend, layout=STACKED).load(tensors, workload),
        hidden_states,
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        hidden_scale=a1q_scale if quantized or per_act_token else None,
        out=output,
        names=ArgumentNames(hidden_scale="a1q_scale", out="output"),
    )


def cutlass_moe_w4a8_fp8(
    a: Tensor,
    w1_q: Tensor,
    w2_q: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    activation: ActFn = SILU,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    group_size: int = GROUP,
    a1q_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Run INT4 experts with FP8 activations per token, as vLLM's CutlassExpertsW4A8Fp8.

    A weight is its code times its scale, exactly. vLLM's kernel multiplies by
    `row_scale * e4m3(group_scale * code)` instead, which `moequant.formats.effective_weight`
    computes; so its results differ by the rounding of that table, and its encoded weights are not
    taken.

    Args:
        a: [M, H] bfloat16, float16 or float32; or float8_e4m3fn, with `a1q_scale`.
        w1_q: uint8 [E, 2 * I, H / 2], gate over up, two's complement nibbles, the even column low;
            [E, I, H / 2] where `activation` has no gate. These run on backends that read them so.
            Or, with four dimensions, `w13_panels` of `pack_experts(...).tensors`, which run on
            sm90_w4a8.
        w2_q: uint8 [E, H, I / 2]; or `w2_panels`.
        topk_weights: [M, T].
        topk_ids: [M, T].
        w1_scale: bfloat16 [E, rows of w1_q, H / 128], multipliers; None with panels, which hold
            theirs.
        w2_scale: bfloat16 [E, H, I / 128]; likewise.
        activation: the function between the GEMMs.
        expert_map: [global experts].
        apply_router_weight_on_input: for T = 1 only.
        global_num_experts: length of `expert_map`, else E; or -1 for either.
        group_size: 128.
        a1q_scale: of quantized `a`, float32 [M, 1].
        backend: name of one that reads the weights as they are given; by default the best here.

    Returns:
        [M, H] in the dtype of `a`, bfloat16 where it is quantized.

    Raises:
        UnsupportedError: another group size, scales with panels or none without, weights on several
            devices, weights that do not go together, no backend that runs this, or as
            `FusedExperts.forward`.
        CheckpointError: weights or scales of another dtype, or of a shape that the weights do not
            have.
    """
    if not _is_one_of(group_size, GROUP):
        raise UnsupportedError(
            f"group_size is {group_size!r}, but must be {GROUP}; quantize with groups of that size"
        )
    check_weights({"w1_q": w1_q, "w2_q": w2_q}, {"w1_scale": w1_scale, "w2_scale": w2_scale})
    if w1_q.dim() == 4:
        if w1_scale is not None or w2_scale is not None:
            raise UnsupportedError("panels hold their scales; leave w1_scale and w2_scale out")
        workload, tensors = _panels(w1_q, w2_q, activation)
        chosen = select(workload, backend or "sm90_w4a8", layout=REGISTRY["sm90_w4a8"].layout)
    else:
        if w1_scale is None or w2_scale is None:
            raise UnsupportedError("w1_q in rows needs w1_scale and w2_scale")
        codes = {"w1_q": w1_q, "w2_q": w2_q}
        _check_bytes(codes)
        workload = workload_of_tensors(
            codes, activation, format="w4a8", activations="fp8_token", packed=2
        )
        weights = {"w1_q": w1_q, "w1_scale": w1_scale, "w2_q": w2_q, "w2_scale": w2_scale}
        tensors = stacked_tensors(weights, workload)
        chosen = select(workload, backend, layout=STACKED)
    _check_global(global_num_experts, expert_map, workload)
    return run_experts(
        chosen.load(tensors, workload),
        a,
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        weight_on_input=apply_router_weight_on_input,
        hidden_scale=a1q_scale,
        names=ArgumentNames(hidden_states="a", hidden_scale="a1q_scale"),
    )


def _scheme(
    a1q_scale: Tensor | None,
    a2_scale: Tensor | None,
    *,
    per_act_token: bool,
    per_out_ch: bool,
    quantized: bool,
) -> str:
    """How activations are quantized.

    Raises:
        UnsupportedError: scales that do not go together.
    """
    if per_act_token:
        if a2_scale is not None:
            raise UnsupportedError(
                "a2_scale is given, but with per_act_token the scales are computed; leave it out"
            )
        return "fp8_token"
    if a2_scale is None:
        if a1q_scale is not None and not quantized:
            raise UnsupportedError(
                "a1q_scale is given, but neither a2_scale nor quantized hidden_states: give both "
                "scales where they are static, and none where they are computed"
            )
        return FP8_TENSOR
    if a1q_scale is None:
        raise UnsupportedError(
            "a2_scale is given, but no a1q_scale: give both scales where they are static, and none "
            "where they are computed"
        )
    if per_out_ch:
        raise UnsupportedError(
            "static scales of activations run only with weights of one scale per matrix; set "
            "per_act_token, or not per_out_ch"
        )
    return "fp8_static"


def _fp8_tensors(
    workload: Workload, w1: Tensor, w2: Tensor, w1_scale: Tensor, w2_scale: Tensor
) -> dict[str, Tensor]:
    """The weights as the layout `stacked` has them."""
    format, E, H = workload.format, workload.experts, workload.hidden
    w1_scale = _three_dimensions("w1_scale", w1_scale, format, (E, w1.shape[1], H))
    w2_scale = _three_dimensions("w2_scale", w2_scale, format, (E, H, workload.intermediate))
    weights = {"w1": w1, "w1_scale": w1_scale, "w2": w2, "w2_scale": w2_scale}
    tensors = stacked_tensors(weights, workload)
    if format == "fp8_tensor" and workload.act_fn.gated:
        # That of gate, and that of up.
        tensors["w13_scale"] = tensors["w13_scale"].expand(E, 2, 1).contiguous()
    return tensors


def _three_dimensions(
    name: str, scale: Tensor, format: str, weight_shape: tuple[int, int, int]
) -> Tensor:
    """The scales of weights [E, rows, columns] as [E, rows, 1], or [E, 1, 1] of whole matrices.

    Raises:
        CheckpointError: they are not that, nor that without dimensions of size 1 at the end; says
            the shape that was given.
    """
    spec = get_format(format).specs(weight_shape, name)["scale"]
    shapes = [list(spec.shape)]
    while shapes[-1][-1] == 1 and len(shapes[-1]) > 1:
        shapes.append(shapes[-1][:-1])
    if list(scale.shape) not in shapes or scale.dtype != spec.dtype:
        weight = name.removesuffix("_scale")
        raise CheckpointError(
            f"{name} is {dtype_text(scale.dtype)} {list(scale.shape)}, but it should be "
            f"{dtype_text(spec.dtype)} {' or '.join(map(str, shapes))}; give {weight} and {name} "
            f"as moequant.formats.quantize makes {format}"
        )
    return scale.reshape(spec.shape)


def _static(scale: Tensor, name: str) -> Tensor:
    """A static scale as [1]. On a GPU its value is not checked: the host would wait for it."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise UnsupportedError(
            f"{name} is {scale.dtype} {list(scale.shape)}, but must be one float32 value; give "
            "that, or set per_act_token"
        )
    if scale.device.type == "cpu" and not 0 < scale.item() < torch.inf:
        raise UnsupportedError(
            f"{name} is {scale.item():g}, but must be positive and finite; calibrate again, or set "
            "per_act_token"
        )
    return scale.reshape(1)


def _dynamic(scale: Tensor, hidden_states: Tensor) -> Tensor:
    """The scale of hidden states that were quantized with one: [1], or [E, 1, 1] of batches.

    0 and NaN are what zeros and NaN may have given.
    """
    shape = [*hidden_states.shape[:1], 1, 1]
    batched = hidden_states.dim() == 3 and list(scale.shape) == shape
    if scale.dtype != torch.float32 or (scale.numel() != 1 and not batched):
        wanted = f"one float32 value{f' or {shape}' if hidden_states.dim() == 3 else ''}"
        raise UnsupportedError(
            f"a1q_scale is {scale.dtype} {list(scale.shape)}, but must be {wanted}; give that, or "
            "set per_act_token"
        )
    return scale if batched else scale.reshape(1)


def _of_rows(scale: Tensor, hidden_states: Tensor) -> Tensor:
    """A scale of all rows as one of each, [..., 1]."""
    return scale.expand(*hidden_states.shape[:-1], 1).contiguous()


def _run_batches(
    output: Tensor,
    hidden_states: Tensor,
    scale: Tensor | None,
    tensors: Mapping[str, Tensor],
    workload: Workload,
    *,
    counts: Tensor | None,
    backend: str | None,
) -> Tensor:
    if counts is None:
        raise UnsupportedError("use_batched_format needs expert_num_tokens")
    name = backend or _BATCHED.get(workload.device.type, "naive_batched")
    packed = select(workload, name, layout=STACKED).load(tensors, workload)
    if not isinstance(packed, BatchedExperts):
        raise UnsupportedError(
            f"backend {name!r} does not run batches; name a batched one, such as "
            f"{', '.join(_BATCHED.values())}"
        )
    if output.shape != hidden_states.shape or output.dtype not in HIDDEN_DTYPES:
        raise UnsupportedError(
            f"output is {output.dtype} {list(output.shape)}, but must be "
            f"{' or '.join(map(str, HIDDEN_DTYPES))} {list(hidden_states.shape)}"
        )
    if not output.is_contiguous():
        raise UnsupportedError(
            f"output has strides {list(output.stride())}, but must be contiguous"
        )
    if output.device != workload.device:
        raise UnsupportedError(
            f"output is on {output.device}, but the experts are on {workload.device}; move it there"
        )
    tokens = BatchedTokens(
        scheme=workload.activations, qdata=hidden_states, scale=scale, counts=counts
    )
    result = packed.run_batches(tokens, names=_BATCH_NAMES)
    with plain_mode(output.device):
        output.copy_(result)
    return refuse_gradient(output, hidden_states, scale)


def _check_bytes(codes: Mapping[str, Tensor]) -> None:
    """Refuse codes that are not in bytes, such as those that vLLM has encoded for its kernel."""
    for name, tensor in codes.items():
        if tensor.dtype != torch.uint8:
            raise CheckpointError(
                f"{name} is {dtype_text(tensor.dtype)} {list(tensor.shape)}, but must be uint8: "
                f"weights that vLLM has encoded are not taken; give {name} and "
                f"{name.removesuffix('_q')}_scale as moequant.formats.quantize makes w4a8"
            )


def _panels(w1: Tensor, w2: Tensor, act_fn: ActFn) -> tuple[Workload, dict[str, Tensor]]:
    """Weights in panels, whose sizes follow from their blocks of 128 columns."""
    check_act_fn(act_fn)
    if w2.dim() != 4:
        raise UnsupportedError(
            f"w1_q is {list(w1.shape)}, which are panels, but w2_q is {list(w2.shape)}; give both "
            "in panels, or both in rows"
        )
    H, I = w1.shape[2] * GROUP, w2.shape[2] * GROUP
    workload = Workload(
        format="w4a8",
        activations="fp8_token",
        experts=w1.shape[0],
        hidden=H,
        intermediate=I,
        device=w1.device,
        act_fn=act_fn,
    )
    tensors = dict(zip(_PANELS, (w1, w2), strict=True))
    advice = dict.fromkeys(_PANELS, "pack_experts makes panels")
    layout = REGISTRY["sm90_w4a8"].layout
    check_packed(layout, tensors, workload, arguments=_PANELS, advice=advice)
    return workload, {name: tensor.contiguous() for name, tensor in tensors.items()}


def _is_one_of(value: object, *numbers: int) -> bool:
    """Whether a caller's argument is one of these whole numbers."""
    try:
        return whole_number(value) in numbers
    except TypeError:
        return False


def _check_global(global_num_experts: int, expert_map: Tensor | None, workload: Workload) -> None:
    known = workload.experts
    if expert_map is not None:
        check_expert_map(expert_map, experts=known, device=workload.device, values=False)
        known = expert_map.shape[0]
    if not _is_one_of(global_num_experts, -1, known):
        there = f"are {known} experts" if expert_map is None else f"is an expert_map of {known}"
        raise UnsupportedError(
            f"global_num_experts is {global_num_experts!r}, but there {there}; give {known} or -1"
        )
