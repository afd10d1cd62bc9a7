"""The experts of a layer in FP8 blocks through DeepGEMM's grouped GEMMs, on SM90.

Each expert's rows start at a multiple of 128, and DeepGEMM is told where they end; or they come in
batches, with counts. Both of its inputs are as its kernels read them: scales of activations are
column-major, so nothing is transposed, but for those of batches that come from outside.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import UnsupportedError
from moequant.kernels.calls import on
from moequant.kernels.deepgemm.act_requantize import act_requantize
from moequant.kernels.deepgemm.library import library
from moequant.kernels.fp8_plan import Fp8Plan
from moequant.kernels.routing import Grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena

ALIGNMENT = 128
"""Rows of a tile of DeepGEMM's kernels for SM90, at which every expert begins."""

_ALIGNMENT_LOCK = Lock()


class DeepGemmPlan(Fp8Plan):
    """See `Fp8Plan`; of fp8_block."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
    ) -> None:
        E = tensors["w2_qdata"].shape[0]
        super().__init__(
            tensors,
            act_fn,
            tokens,
            topk,
            arena,
            grouping=Grouping(experts=E, tile_rows=ALIGNMENT, alignment=ALIGNMENT),
            by_token=False,
            row_bias=tensors.get("w2_bias"),
        )

    def multiply(self, weight: str, x: Tensor, x_scale: Tensor, out: Tensor) -> None:
        """See `Fp8Plan.multiply`."""
        deep_gemm = library()
        with _aligned(deep_gemm):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (x, x_scale.mT),
                _weight(self.tensors, weight),
                out,
                self.routing.row_end,
                use_psum_layout=True,
                ensure_zero_padding=False,
            )

    def activate(self) -> None:
        """See `Fp8Plan.activate`; adds the biases first."""
        act_requantize(
            self.gate_up,
            self.act,
            self.act_scale,
            self.act_fn,
            row_of_pair=self.routing.row_of_pair,
            bias=self.tensors.get("w13_bias"),
            row_end=self.routing.row_end,
        )


def batched_experts(
    tensors: Mapping[str, Tensor], act_fn: ActFn, qdata: Tensor, scale: Tensor, counts: Tensor
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        tensors: FP8 blocks in the layout `stacked`, on a device of SM90.
        act_fn: the function between the GEMMs.
        qdata: float8_e4m3fn [E, C, H].
        scale: float32 [E, C, ceil(H / 128)].
        counts: [E] int32, at most C.

    Returns:
        [E, C, H] bfloat16, rounded twice with a bias; rows at or beyond counts[e] can be anything.
    """
    E, C, H = qdata.shape
    # A tile that begins before counts[e] is written whole: it must end before the next expert.
    pad = (0, 0, 0, -C % ALIGNMENT)
    x = torch.nn.functional.pad(qdata.view(torch.uint8), pad).view(torch.float8_e4m3fn)
    x_scale = torch.nn.functional.pad(scale, pad)
    rows = x.shape[1]
    I = tensors["w2_qdata"].shape[2]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=qdata.device)

    y = empty(E, rows, H, dtype=torch.bfloat16)
    if y.numel():
        gate_up = empty(E, rows, tensors["w13_qdata"].shape[1], dtype=torch.bfloat16)
        act = empty(E, rows, I, dtype=torch.float8_e4m3fn)
        act_scale = empty(E, -(-I // 128), rows, dtype=torch.float32)
        with on(qdata.device):
            _masked_gemm(x, x_scale, _weight(tensors, "w13"), gate_up, counts)
            act_requantize(
                gate_up, act, act_scale, act_fn, counts=counts, bias=tensors.get("w13_bias")
            )
            _masked_gemm(act, act_scale.mT, _weight(tensors, "w2"), y, counts)
        if "w2_bias" in tensors:
            y += tensors["w2_bias"][:, None]
    return y[:, :C]


def _weight(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{name}_qdata"], tensors[f"{name}_scale"]


def _masked_gemm(
    x: Tensor, scale: Tensor, weight: tuple[Tensor, Tensor], out: Tensor, counts: Tensor
) -> None:
    deep_gemm = library()
    # Named after what else it multiplies in some wheels, sgl-deep-gemm 0.1.5.post1 for one.
    gemm = getattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked", None)
    if gemm is None:
        gemm = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
    # The mean rows of an expert, which only chooses a tile: they are on the device.
    gemm((x, scale), weight, out, counts, min(x.shape[1], ALIGNMENT))


@contextmanager
def _aligned(deep_gemm: Any) -> Iterator[None]:
    """Within it, DeepGEMM expects each expert's rows at a multiple of ALIGNMENT.

    That is a setting of the process, which another library may have changed. Its value is put back
    afterwards, for it matters only while a call is launched. The lock serves calls from here: if
    another thread calls or sets up DeepGEMM at the same time by itself, either may get the other's
    alignment, which nothing can detect.

    Raises:
        UnsupportedError: it has another value, and this release of deep_gemm cannot set it.
    """
    with _ALIGNMENT_LOCK:
        found = deep_gemm.get_mk_alignment_for_contiguous_layout()
        if found == ALIGNMENT:
            yield
            return
        set_alignment = _alignment_setter(deep_gemm, found)
        set_alignment(ALIGNMENT)
        try:
            yield
        finally:
            set_alignment(found)


def _alignment_setter(deep_gemm: Any, found: int) -> Callable[[int], None]:
    name = "set_mk_alignment_for_contiguous_layout"
    # sgl-deep-gemm 0.1.5.post1 has it in its extension module alone.
    for module in (deep_gemm, getattr(deep_gemm, "_C", None)):
        setter: Callable[[int], None] | None = getattr(module, name, None)
        if setter is not None:
            return setter
    raise UnsupportedError(
        f"the alignment of deep_gemm's contiguous layout is {found}, but these experts need "
        f"{ALIGNMENT}, and this release of deep_gemm has no {name}; set it back to {ALIGNMENT} "
        "where it was changed, or use the backend sm90_fp8_block"
    )
