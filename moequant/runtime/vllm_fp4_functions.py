"""vLLM's functions around its CUTLASS kernels for FP4 by FP4, on the kernels for SM100 here.

Names, order and meaning of arguments are those of `cutlass_moe.py` of vLLM 00606a9. Left
out is what tensors say or what only vLLM's kernels need: m, n, k, e, the device and workspaces.
Nothing is read on the host, and contiguous weights are not copied. A call makes what `pack_experts`
makes once; where calls repeat eagerly, `pack_experts` and `fused_experts` spend less time on the
host.

The kernels were compiled, and never run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.arguments import check_tensor
from moequant.errors import UnsupportedError
from moequant.kernels.cutlass.sm100_fp4_variant import MXFP4 as MXFP4_KERNEL
from moequant.kernels.cutlass.sm100_fp4_variant import NVFP4 as NVFP4_KERNEL
from moequant.runtime.activations import MXFP4, NVFP4, NVFP4_STATIC
from moequant.runtime.backends import REGISTRY, Workload
from moequant.runtime.call import run_experts
from moequant.runtime.functional import check_packed, check_weights, workload_of_tensors
from moequant.runtime.inputs import ArgumentNames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn

_BACKEND = REGISTRY["cutlass_fp4"]


def run_cutlass_moe_fp4(
    output: Tensor,
    a: Tensor,
    a1_gscale: Tensor | None,
    w1_fp4: Tensor,
    w1_blockscale: Tensor,
    w1_alphas: Tensor,
    a2_gscale: Tensor | None,
    w2_fp4: Tensor,
    w2_blockscale: Tensor,
    w2_alphas: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: ActFn,
    *,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """Run NVFP4 experts with NVFP4 activations on SM100, as vLLM's CutlassExpertsFp4.

    Compiled, never run: there was no SM100 GPU.

    Unlike there: `a` may be float32 and is never written to; the global scales of activations may
    be left out, and then each token has its own; gate and up may have an alpha each; an id that is
    no expert's contributes nothing; scales of sizes that are not multiples of a tile are padded for
    each expert; and `output` is returned. Quotients are rounded correctly where vLLM's kernels take
    approximate reciprocals, so that codes may differ in rare cases.

    Args:
        output: [M, H] contiguous, of the dtype of `a`, written.
        a: [M, H] bfloat16, float16 or float32.
        a1_gscale: float32 [E], for each expert what its input is multiplied by before it is
            quantized: 1 / input_scale; or None, and each token's is computed. Its values are not
            read, so they are not checked either.
        w1_fp4: uint8 [E, 2 * I, H / 2], gate over up, E2M1, the even column low; [E, I, H / 2]
            where `activation` has no gate. H and I are multiples of 32.
        w1_blockscale: float8_e4m3fn [E, ceil128(rows of w1_fp4), ceil4(H / 16)], swizzled 128x4 by
            expert: `moequant.layouts.swizzle_128x4.swizzle` of [E, rows, H / 16].
        w1_alphas: float32 [E], the global scale of the weights divided by `a1_gscale`; with
            `a1_gscale` None, the global scale alone. Or [E, 2], gate's and up's.
        a2_gscale: likewise of the second GEMM's input; None if and only if `a1_gscale` is.
        w2_fp4: uint8 [E, H, I / 2].
        w2_blockscale: float8_e4m3fn [E, ceil128(H), ceil4(I / 16)], swizzled likewise.
        w2_alphas: float32 [E].
        topk_weights: [M, T] float32, bfloat16 or float16.
        topk_ids: [M, T] int32 or int64.
        activation: the function between the GEMMs.
        apply_router_weight_on_input: whether router weights multiply `a`; for T = 1 only.

    Returns:
        `output`.

    Raises:
        UnsupportedError: a device other than SM100, sizes that the kernels do not have, one global
            scale of activations without the other, weights on several devices; or as
            `FusedExperts.forward`.
        CheckpointError: a weight, scale or alpha of another shape or dtype.
    """
    if (a1_gscale is None) != (a2_gscale is None):
        missing, there = ("a1", "a2") if a1_gscale is None else ("a2", "a1")
        raise UnsupportedError(
            f"{missing}_gscale is None, but {there}_gscale is given; give both, or none, and every "
            "token has its own global scales"
        )
    given = {n: s for n, s in (("w13", a1_gscale), ("w2", a2_gscale)) if s is not None}
    tensors = {
        "w13_qdata": w1_fp4,
        "w13_scale": w1_blockscale,
        "w13_global_scale": w1_alphas,
        "w2_qdata": w2_fp4,
        "w2_scale": w2_blockscale,
        "w2_global_scale": w2_alphas,
    } | {f"{of}_input_scale": scale for of, scale in given.items()}
    scheme = NVFP4_STATIC if given else NVFP4
    workload = _workload("run_cutlass_moe_fp4", NVFP4_KERNEL.name, scheme, tensors, activation)
    # Others are shown as they were given.
    if (w1_alphas.shape, w1_alphas.dtype) == ((workload.experts,), torch.float32):
        tensors["w13_global_scale"] = w1_alphas[:, None].expand(-1, 1 + activation.gated)
    check_packed(_BACKEND.layout, tensors, workload, arguments=_ARGUMENTS, advice=_ADVICE)
    for of, scale in given.items():
        alphas = tensors[f"{of}_global_scale"]
        per_expert = scale.view(-1, *[1] * (alphas.dim() - 1))
        tensors[f"{of}_global_scale"] = alphas * per_expert
        tensors[f"{of}_input_scale"] = scale.reciprocal()
    return _run(output, a, tensors, workload, topk_weights, topk_ids, apply_router_weight_on_input)


def run_cutlass_moe_mxfp4(
    output: Tensor,
    a: Tensor,
    w1_fp4: Tensor,
    w1_blockscale: Tensor,
    w2_fp4: Tensor,
    w2_blockscale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: ActFn,
    *,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """Run MXFP4 experts with MXFP4 activations on SM100, as vLLM's CutlassExpertsMxfp4.

    Compiled, never run: there was no SM100 GPU.

    What is not described here, also where it differs from vLLM's, is as for `run_cutlass_moe_fp4`.

    Args:
        output: [M, H] contiguous, of the dtype of `a`, written.
        a: [M, H] bfloat16, float16 or float32.
        w1_fp4: uint8 [E, 2 * I, H / 2]; [E, I, H / 2] where `activation` has no gate.
        w1_blockscale: uint8 or float8_e8m0fnu [E, ceil128(rows of w1_fp4), ceil4(H / 32)], swizzled
            128x4 by expert.
        w2_fp4: uint8 [E, H, I / 2].
        w2_blockscale: uint8 or float8_e8m0fnu [E, ceil128(H), ceil4(I / 32)], swizzled likewise.
        topk_weights: [M, T].
        topk_ids: [M, T].
        activation: the function between the GEMMs.
        apply_router_weight_on_input: whether router weights multiply `a`; for T = 1 only.

    Returns:
        `output`.

    Raises:
        UnsupportedError: a device other than SM100, sizes that the kernels do not have, weights on
            several devices; or as `FusedExperts.forward`.
        CheckpointError: a weight or scale of another shape or dtype.
    """
    tensors = {
        "w13_qdata": w1_fp4,
        "w13_scale": w1_blockscale,
        "w2_qdata": w2_fp4,
        "w2_scale": w2_blockscale,
    }
    workload = _workload("run_cutlass_moe_mxfp4", MXFP4_KERNEL.name, MXFP4, tensors, activation)
    tensors |= {name: _as_e8m0(tensors[name]) for name in ("w13_scale", "w2_scale")}
    check_packed(_BACKEND.layout, tensors, workload, arguments=_ARGUMENTS, advice=_ADVICE)
    return _run(output, a, tensors, workload, topk_weights, topk_ids, apply_router_weight_on_input)


_ARGUMENTS = {
    "w13_qdata": "w1_fp4",
    "w13_scale": "w1_blockscale",
    "w13_global_scale": "w1_alphas",
    "w13_input_scale": "a1_gscale",
    "w2_qdata": "w2_fp4",
    "w2_scale": "w2_blockscale",
    "w2_global_scale": "w2_alphas",
    "w2_input_scale": "a2_gscale",
}
"""What the tensors of the layout are called here."""

_CODES = "moequant.formats.quantize makes such codes"
_SCALES = "moequant.layouts.swizzle_128x4.swizzle makes it of scales by row"
_ADVICE = {
    "w13_qdata": _CODES,
    "w13_scale": _SCALES,
    "w13_global_scale": "or [E], for gate and up together",
    "w13_input_scale": "give one for each expert",
    "w2_qdata": _CODES,
    "w2_scale": _SCALES,
    "w2_global_scale": "give one for each expert",
    "w2_input_scale": "give one for each expert",
}
"""What to do about a tensor of another shape or dtype."""


def _workload(
    function: str, format: str, scheme: str, tensors: Mapping[str, Tensor], act_fn: ActFn
) -> Workload:
    """What is asked for, if the backend runs it."""
    check_weights({_ARGUMENTS[name]: tensor for name, tensor in tensors.items()})
    weights = {_ARGUMENTS[name]: tensors[name] for name in ("w13_qdata", "w2_qdata")}
    workload = workload_of_tensors(weights, act_fn, format=format, activations=scheme, packed=2)
    reason = _BACKEND.supports(workload)
    if reason is not None:
        raise UnsupportedError(
            f"{function} runs backend {_BACKEND.marked_name} on SM100 (compute capability 10.0), "
            f"and that does not run H {workload.hidden}, I {workload.intermediate} on "
            f'{workload.device}: {reason}; elsewhere, pack_experts with activations="none" and '
            "fused_experts run the same weights, whose scales "
            "moequant.layouts.swizzle_128x4.unswizzle puts in order, and "
            'backend="torch_reference" computes the same with these activations'
        )
    return workload


def _as_e8m0(scale: Tensor) -> Tensor:
    """What vLLM has as bytes, as torch calls it."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def _run(
    output: Tensor,
    a: Tensor,
    tensors: Mapping[str, Tensor],
    workload: Workload,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weight_on_input: bool,
) -> Tensor:
    check_tensor("output", output)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return run_experts(
        _BACKEND.load(contiguous, workload),
        a,
        topk_weights,
        topk_ids,
        weight_on_input=weight_on_input,
        out=output,
        names=ArgumentNames(hidden_states="a", out="output"),
    )
