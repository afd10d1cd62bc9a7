"""The two grouped GEMMs of W4A8 experts, for SM90: see sm90_w4a8_grouped_gemm.cu."""

from __future__ import annotations

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
from moequant.kernels.sm90_w4a8.layout import PANEL_BYTES, panels

THREADS = 384
_CLASSES = (8, 16, 32, 48, 64, 96, 128)
_SHARED_LIMIT = 227 * 1024
_SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True, kw_only=True)
class W4a8GemmConfig:
    """What one compiled kernel is for.

    Attributes:
        act: one of ACT_FNS, applied to the sums; None for the sums themselves.
        gated: the weights are gate and up; with an `act` only.
        limited: whether what goes into the activation function is clamped.
        bias: whether there is one to add.
        gather: T where x is of tokens, not of rows; 0 where not.
        routed: tiles are made from ids, at most ROUTED_SLOTS, and weights are not waited for.
        rows: most rows of a tile: a multiple of 8, of 16 above 64, at most 128.
        split: CTAs that share a unit along K: 1, 2 or 4; 1 above 32 rows.
        pair: whether CTAs of a cluster have two tiles and share weights.
        K: columns of the weights.
        n_out: columns of the output: I or H.
    """

    act: str | None
    gated: bool
    limited: bool = False
    bias: bool = False
    gather: int = 0
    routed: bool = False
    rows: int
    split: int = 1
    pair: bool = False
    K: int
    n_out: int

    @property
    def panels(self) -> int:
        """Panels of an expert's weights."""
        return panels(self.n_out, gated=self.gated)

    @property
    def units_n(self) -> int:
        """Units along the weight rows."""
        return -(-self.panels // 2)

    @property
    def w_rows(self) -> int:
        """Weight rows of an expert."""
        return self.n_out * (2 if self.gated else 1)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.pair else self.split

    @property
    def classes(self) -> list[int]:
        """Rows that a tile is computed as: the smallest that holds its own."""
        least = 8 if self.rows <= 32 else 16
        return [*(n for n in _CLASSES if least <= n < self.rows), self.rows]

    @property
    def stages(self) -> int:
        """As many as shared memory holds."""
        return (_SHARED_LIMIT - self._fixed_bytes()) // self._stage_bytes()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.stages * self._stage_bytes() + self._fixed_bytes()

    def _stage_bytes(self) -> int:
        return 2 * PANEL_BYTES + self.rows * 128 + 2 * 8

    def _fixed_bytes(self) -> int:
        barriers = 16 + 128 + 128  # and units, with room to align them
        partial = (self.split - 1) * self.rows * 256 * 4
        tiles = (ROUTED_SLOTS + 1) * 16 if self.routed else 0
        return barriers + partial + tiles

    def defines(self) -> dict[str, int]:
        """Macros of the source."""
        return {
            "ROWS": self.rows,
            "ACTIVATED": int(self.act is not None),
            "GATED": int(self.gated),
            "ACT": ACT_FNS.index(self.act or ACT_FNS[0]),
            "LIMITED": int(self.limited),
            "BIAS": int(self.bias),
            "GATHER": self.gather,
            "ROUTED": int(self.routed),
            "STAGES": self.stages,
            "SPLIT": self.split,
            "PAIR": 1 + self.pair,
            "K": self.K,
            "KBLOCKS": -(-self.K // 128),
            "UNITS_N": self.units_n,
            "PANELS": self.panels,
            "N_OUT": self.n_out,
            "W_ROWS": self.w_rows,
            "EARLY": int(self.routed or self.act is None),
        }

    def source(self) -> str:
        """C++ without the macros."""
        text = read_source(_SOURCE).replace("//CLASSES", _classes(self.classes))
        return text.replace("//WGMMA", "".join(wgmma(n, a_in_registers=True) for n in self.classes))

    def compile(self) -> bytes:
        """Machine code."""
        return compile_cubin(self.source(), self.defines())


def _classes(sizes: list[int]) -> str:
    """The classes of tiles: index of the one for so many rows, its rows, and a case for each."""
    last = len(sizes) - 1
    index = "".join(f"rows <= {n} ? {i} : " for i, n in enumerate(sizes[:-1]))
    rows = "".join(f"c == {i} ? {n} : " for i, n in enumerate(sizes[:-1]))
    each = " ".join(f"F({i}, {n})" for i, n in enumerate(sizes))
    return (
        f"constexpr int CLASSES = {len(sizes)};\n"
        f"__device__ __forceinline__ int class_of(int rows) {{ return {index}{last}; }}\n"
        f"__device__ __forceinline__ int rows_of(int c) {{ return {rows}{sizes[-1]}; }}\n"
        f"#define EACH_CLASS(F) {each}\n"
    )


@cache
def _kernel(config: W4a8GemmConfig, device: int) -> Kernel:
    return Kernel.load(
        config.compile(),
        "w4a8_grouped_gemm",
        threads=THREADS,
        shared_bytes=config.shared_bytes,
        cluster=config.cluster,
    )


@cache
def _clusters(config: W4a8GemmConfig, device: int) -> int:
    """Clusters, or single CTAs, that run at once."""
    if config.cluster == 1:
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _kernel(config, device).most_clusters()


class W4a8GroupedGemm:
    """A grouped GEMM over fixed weights and buffers; a call launches one kernel.

    It keeps no tensor: what it is given must outlive it.

    Args:
        config: the kernel.
        weight: uint8 [E, panels, ceil(K / 128), PANEL_BYTES] contiguous, see layout.py.
        x: float8_e4m3fn [rows, K], rows in the order of the experts; [M, K] if it gathers.
        x_scale: float32 [rows]; [M] if it gathers.
        tiles: int32 [max_tiles, 4], runs of at most `config.rows` rows.
        tile_count: int32 [1].
        units_taken: int32 [1], 0 before each call.
        out: bfloat16 [rows, n_out].
        slot_of_row: int32 [rows], if it gathers; else None.
        bias: float32 [E, w_rows] contiguous, if `config` has one; else None.
        act_fn: the numbers of the activation function, if `config` has one.
    """

    def __init__(
        self,
        config: W4a8GemmConfig,
        *,
        weight: Tensor,
        x: Tensor,
        x_scale: Tensor,
        tiles: Tensor,
        tile_count: Tensor,
        units_taken: Tensor,
        out: Tensor,
        slot_of_row: Tensor | None = None,
        bias: Tensor | None = None,
        act_fn: ActFn = SILU,
    ) -> None:
        assert weight.shape[1:] == (config.panels, -(-config.K // 128), PANEL_BYTES)
        assert all(t.is_contiguous() for t in (weight, x, x_scale, out))
        assert (slot_of_row is not None) == bool(config.gather)
        assert (bias is not None) == config.bias
        assert bias is None or (bias.is_contiguous() and bias.shape[1] == config.w_rows)
        index = weight.device.index or 0
        bytes_of_x = x.view(torch.uint8)[:, : config.K]
        classes = config.classes
        self._routing = RoutingArguments(map_size=-1, experts=weight.shape[0])

        kernel = _kernel(config, index)
        units = tiles.shape[0] * -(-config.units_n // (1 + config.pair))
        self._launch = Launch(
            kernel,
            min(_clusters(config, index), units) * config.cluster,
            [
                pointer(weight),
                (TensorMap * len(classes))(
                    *(tensor_map(bytes_of_x, box=(n, 128)) for n in classes)
                ),
                pointer(x_scale),
                pointer(tiles),
                pointer(tile_count),
                pointer(out),
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
