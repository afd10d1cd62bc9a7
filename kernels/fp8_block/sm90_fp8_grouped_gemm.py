"""The two grouped GEMMs of experts in FP8 blocks, for SM90: see sm90_fp8_grouped_gemm.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moequant.act_fn import SILU, ActFn
from moequant.kernels.cuda_driver import Kernel, Launch, TensorMap, compile_cubin, tensor_map
from moequant.kernels.sm90.arguments import (
    ACT_FNS,
    ROUTED_SLOTS,
    ActArguments,
    RoutingArguments,
    pointer,
)
from moequant.kernels.sm90.source import read_source, wgmma

THREADS = 384
_SHARED_LIMIT = 227 * 1024
_SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """What one compiled kernel is for.

    Attributes:
        quantized: the activation function of the sums, quantized, out; else bfloat16 sums.
        gated: the weights are gate over up; `quantized` too.
        act: one of ACT_FNS, where it is quantized.
        limited: whether what goes into the activation function is clamped.
        bias: whether there is one to add.
        gather: T where x is of tokens, not of rows; 0 where not. For 64 and 128 rows.
        routed: tiles are made from ids, at most ROUTED_SLOTS, and weights are not waited for.
        rows: most rows a CTA has of a tile: 8, 16, 32, 64 or 128.
        extra: rows that a tile of 128 may have beyond: 0 or 16.
        split: CTAs that share a unit along K: 1, 2 or 4; 1 from 64 rows up.
        pair: whether CTAs of a cluster have two tiles and share weights; for 128 rows only.
        K: columns of the weights.
        n_out: columns of the output: I, padded, or H.
        n_real: those of them that are not padding; by default all.
        w_rows: weight rows of an expert.
    """

    quantized: bool
    gated: bool
    act: str = "silu"
    limited: bool = False
    bias: bool = False
    routed: bool = False
    gather: int = 0
    rows: int
    extra: int = 0
    split: int
    pair: bool = False
    K: int
    n_out: int
    n_real: int | None = None
    w_rows: int

    @property
    def units_n(self) -> int:
        """Units along the weight rows."""
        return -(-self.n_out // (128 if self.gated else 256))

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.pair else self.split

    @property
    def stages(self) -> int:
        """As many as shared memory holds."""
        return (_SHARED_LIMIT - self._fixed_bytes()) // self._stage_bytes()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.stages * self._stage_bytes() + self._fixed_bytes()

    def _stage_bytes(self) -> int:
        most = self.rows + self.extra
        scale = -(-most * 4 // 128) * 128
        return 256 * 128 + most * 128 + scale + 3 * 8

    def _fixed_bytes(self) -> int:
        barriers = 16 + 128 + 128  # and units, with room to align them
        if self.rows == 128:
            boxes = 1 if self.quantized and self.gated else 2
            return barriers + 8 * boxes * 2048  # staging
        groups = 1 if self.gated else 2
        few = groups * self.rows * 128 + self.rows * 32 if self.quantized else 0
        partial = (self.split - 1) * self.rows * 256 * 4
        tiles = (ROUTED_SLOTS + 1) * 16 if self.routed else 0
        return barriers + few + partial + tiles

    def defines(self) -> dict[str, int]:
        """Macros of the source."""
        return {
            "ROWS": self.rows,
            "EXTRA": self.extra,
            "QUANTIZED": int(self.quantized),
            "GATED": int(self.gated),
            "ACT": ACT_FNS.index(self.act),
            "LIMITED": int(self.limited),
            "BIAS": int(self.bias),
            "ROUTED": int(self.routed),
            "STAGES": self.stages,
            "SPLIT": self.split,
            "PAIR": 1 + self.pair,
            "GATHER": self.gather,
            "K": self.K,
            "KBLOCKS": -(-self.K // 128),
            "UNITS_N": self.units_n,
            "N_OUT": self.n_out,
            "N_REAL": self.n_out if self.n_real is None else self.n_real,
            "W_ROWS": self.w_rows,
            "W_SCALE_ROWS": -(-self.w_rows // 128),
            "EARLY": int(self.routed or not self.quantized),
        }

    def source(self) -> str:
        """C++ without the macros."""
        sizes = [n for n in (8, 16, 32, 64, 128) if n <= self.rows and (n > 8 or self.rows == 8)]
        return read_source(_SOURCE).replace("//WGMMA", "".join(map(wgmma, sizes)))

    def compile(self) -> bytes:
        """Machine code."""
        return compile_cubin(self.source(), self.defines())


@cache
def _kernel(config: GemmConfig, device: int) -> Kernel:
    return Kernel.load(
        config.compile(),
        "fp8_grouped_gemm",
        threads=THREADS,
        shared_bytes=config.shared_bytes,
        cluster=config.cluster,
    )


@cache
def _clusters(config: GemmConfig, device: int) -> int:
    """Clusters, or single CTAs, that run at once."""
    if config.cluster == 1:
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _kernel(config, device).most_clusters()


class GroupedGemm:
    """A grouped GEMM over fixed weights and buffers; a call launches one kernel.

    It keeps no tensor: what it is given must outlive it.

    Args:
        config: the kernel.
        weight: float8_e4m3fn [E, w_rows, K] contiguous.
        weight_scale: float32 [E, ceil(w_rows / 128), ceil(K / 128)] contiguous.
        x: float8_e4m3fn [rows, >= K], rows in the order of the experts; [M, K] if it gathers.
        x_scale: float32 [ceil(K / 128), row stride]; [M, ceil(K / 128) to a multiple of 4] if it
            gathers.
        tiles: int32 [max_tiles, 4], runs of at most `config.rows` rows.
        tile_count: int32 [1].
        units_taken: int32 [1], 0 before each call.
        out: [rows, n_out] float8_e4m3fn if quantized, else bfloat16.
        out_scale: float32 [n_out / 128, row stride], the stride of `x_scale` unless it gathers, if
            quantized; else None.
        slot_of_row: int32 [rows], if it gathers; else None.
        bias: float32 [E, w_rows] contiguous, if `config` has one; else None.
        act_fn: the activation function, whose name `config` has too.
    """

    def __init__(
        self,
        config: GemmConfig,
        *,
        weight: Tensor,
        weight_scale: Tensor,
        x: Tensor,
        x_scale: Tensor,
        tiles: Tensor,
        tile_count: Tensor,
        units_taken: Tensor,
        out: Tensor,
        out_scale: Tensor | None,
        slot_of_row: Tensor | None = None,
        bias: Tensor | None = None,
        act_fn: ActFn = SILU,
    ) -> None:
        assert weight.shape[1:] == (config.w_rows, config.K)
        assert all(t.is_contiguous() for t in (weight, weight_scale, out))
        assert weight_scale.shape[1:] == (-(-config.w_rows // 128), -(-config.K // 128))
        assert x_scale.stride(1) == 1
        assert (slot_of_row is not None) == bool(config.gather)
        strided = x_scale if out_scale is None else out_scale
        assert config.gather or strided.stride(0) == x_scale.stride(0)
        assert not config.gather or x.is_contiguous()
        assert (bias is not None) == config.bias
        assert bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:2])
        index = weight.device.index or 0
        bytes_of_x = x.view(torch.uint8)[:, : config.K]
        boxes = [min(rows, config.rows) for rows in (16, 32, 64, 128)]
        x_map = {rows: tensor_map(bytes_of_x, box=(rows, 128)) for rows in set(boxes)}
        rows_of_weight = weight.view(torch.uint8).flatten(0, 1)
        self._routing = RoutingArguments(map_size=-1, experts=weight.shape[0])

        kernel = _kernel(config, index)
        units = tiles.shape[0] * -(-config.units_n // (1 + config.pair))
        self._launch = Launch(
            kernel,
            min(_clusters(config, index), units) * config.cluster,
            [
                tensor_map(rows_of_weight, box=(128, 128)),
                tensor_map(rows_of_weight, box=(64, 128)),
                (TensorMap * 4)(*(x_map[rows] for rows in boxes)),
                tensor_map(out.view(torch.uint8), box=(16, 128)),
                pointer(weight_scale),
                pointer(x_scale),
                pointer(tiles),
                pointer(tile_count),
                pointer(out),
                pointer(out_scale),
                ctypes.c_int(strided.stride(0)),
                pointer(units_taken),
                pointer(bias),
                ActArguments.of(act_fn),
                self._routing,
                pointer(x),
                pointer(slot_of_row),
            ],
        )

    def route(self, topk_ids: Tensor, expert_map: Tensor | None) -> None:
        """Where a routed kernel finds the ids of its next call, contiguous int32 or int64."""
        self._routing.route(topk_ids, expert_map)

    def __call__(self, stream: int) -> None:
        """Launch on a stream of CUDA's."""
        self._launch(stream)
