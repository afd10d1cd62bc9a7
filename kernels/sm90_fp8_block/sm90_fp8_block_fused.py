"""Experts in FP8 blocks on SM90, with activations in FP8 groups of 128.

The first GEMM quantizes what its activation function gives, as a group lies within a unit of work.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moequant.kernels.cuda_driver import pointer, tensor_map
from moequant.kernels.sm90.grouped_gemm import GemmConfig
from moequant.kernels.sm90.tiling import Tiling, Tilings
from moequant.kernels.sm90.weights import Sm90Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.kernels.sm90.buffers import Buffers


_EXTRA_ROWS = 16


class Fp8BlockTilings(Tilings):
    """Rules from timings on an H200, see docs/kernels.md."""

    name = "fp8_block"
    version = 3
    rows: ClassVar[tuple[int, ...]] = (8, 16, 32, 64, 128)
    pair_rows: ClassVar[tuple[int, ...]] = (128,)
    gather_rows: ClassVar[tuple[int, ...]] = (64, 128)

    def _split(self, rows: int, rounds: float) -> int:
        # Halves fill SMs that have nothing, and the second of two rounds that is not full.
        return 2 if rows <= 16 and (rounds <= 0.5 or 1 < rounds < 2) else 1

    def _gathers(self, rows: int, pair: bool, topk: int) -> bool:
        # Copies of tokens cost memory bandwidth, which is free where fewer rows wait for it.
        return pair


@dataclass(frozen=True, kw_only=True)
class Fp8BlockGemmConfig(GemmConfig):
    """A GEMM with FP8 blocks; what has an `act` is quantized behind it.

    Attributes:
        extra: rows that a tile of 128 may have beyond: 0 or 16.
        n_real: columns of the output that are not padding.
    """

    extra: int = 0
    n_real: int

    path = Path(__file__).with_name("sm90_fp8_block_grouped_gemm.cu")
    a_in_registers = False

    @property
    def classes(self) -> list[int]:
        """See `GemmConfig.classes`."""
        return [n for n in Fp8BlockTilings.rows if n <= self.rows and (n > 8 or self.rows == 8)]

    def _stage_bytes(self) -> int:
        most = self.rows + self.extra
        scales = -(-most * 4 // 128) * 128 + 2 * 4  # of the rows, and of two blocks of weights
        return 256 * 128 + most * 128 + scales

    def _own_bytes(self) -> int:
        # Staging of the output; behind it, the largest values of rows.
        if self.rows == 128:
            return 8 * (1 if self.gated else 2) * 2048
        groups = 1 if self.gated else 2
        return groups * self.rows * 128 + self.rows * 32 if self.act else 0

    def defines(self) -> dict[str, int]:
        """See `GemmConfig.defines`."""
        return {**super().defines(), "EXTRA": self.extra, "N_REAL": self.n_real}


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8BlockWeights(Sm90Weights):
    """Weights of E experts as they are on disk, gate over up.

    `w13` is float8_e4m3fn [E, 2 * Ip, H], Ip a multiple of 128, or [E, Ip, H] where there is no
    gate; `w2` is [E, H, I], I at most Ip. H and I are multiples of 16.

    Attributes:
        w13_scale: float32 [E, 2 * Ip / 128, ceil(H / 128)], or half as many rows.
        w2_scale: float32 [E, ceil(H / 128), ceil(I / 128)].
    """

    w13_scale: Tensor
    w2_scale: Tensor

    family = Fp8BlockTilings()

    @property
    def padded(self) -> int:
        """See `Sm90Weights.padded`."""
        return self.w13.shape[1] // (2 if self.act_fn.gated else 1)

    def extra_rows(self, tiling: Tiling) -> int:
        """16 for tiles of 128.

        Where CTAs share weights both would wait; what copies tokens wants registers.
        """
        return _EXTRA_ROWS if tiling.rows == 128 and not (tiling.pair or tiling.gather) else 0

    def scale_shape(self, rows: int, columns: int, *, by_token: bool = False) -> tuple[int, ...]:
        """By groups of 128, 16 bytes of them at a time."""
        groups = -(-columns // 128)
        return (rows, -(-groups // 4) * 4) if by_token else (groups, -(-rows // 4) * 4)

    def gemm(
        self, common: dict[str, Any], buffers: Buffers, tiling: Tiling
    ) -> tuple[GemmConfig, Callable[[], list[Any]]]:
        """See `Sm90Weights.gemm`."""
        first = common["act"] is not None
        n_real = self.intermediate if first else common["n_out"]
        config = Fp8BlockGemmConfig(**common, extra=self.extra_rows(tiling), n_real=n_real)
        weight = self.w13 if first else self.w2
        scale = self.w13_scale if first else self.w2_scale
        codes_scale = buffers.codes_scale
        assert codes_scale is not None
        out, out_scale = (buffers.between, codes_scale) if first else (buffers.y, None)
        assert weight.shape[1:] == (config.w_rows, config.K)
        assert scale.shape[1:] == (-(-config.w_rows // 128), -(-config.K // 128))
        assert weight.is_contiguous()
        assert scale.is_contiguous()

        def own() -> list[Any]:
            rows = weight.view(torch.uint8).flatten(0, 1)
            return [
                tensor_map(rows, box=(128, 128)),
                tensor_map(rows, box=(64, 128)),
                tensor_map(out.view(torch.uint8), box=(16, 128)),
                pointer(scale),
                pointer(out_scale),
                ctypes.c_int(codes_scale.stride(0)),
            ]

        return config, own
