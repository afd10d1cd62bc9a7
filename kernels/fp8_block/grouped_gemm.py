"""The two grouped GEMMs of experts in FP8 blocks, for SM90: see grouped_gemm.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moequant.kernels.cuda_driver import Kernel, TensorMap, compile_cubin, tensor_map

THREADS = 384
_SHARED_LIMIT = 227 * 1024
_SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """What one compiled kernel is for.

    Attributes:
        gated: gate and up in, silu(gate) * up quantized out; else plain, bfloat16 out.
        rows: most rows a CTA has of a tile: 8, 16, 32, 64 or 128.
        split: CTAs that share a unit along K: 1, 2 or 4; 1 from 64 rows up.
        K: columns of the weights.
        n_out: columns of the output: I or H.
        w_rows: weight rows of an expert.
    """

    gated: bool
    rows: int
    split: int
    K: int
    n_out: int
    w_rows: int

    @property
    def units_n(self) -> int:
        """Units along the weight rows."""
        return -(-self.n_out // (128 if self.gated else 256))

    @property
    def stages(self) -> int:
        """As many as shared memory holds."""
        return (_SHARED_LIMIT - self._fixed_bytes()) // self._stage_bytes()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.stages * self._stage_bytes() + self._fixed_bytes()

    def _stage_bytes(self) -> int:
        scale = -(-self.rows * 4 // 128) * 128
        return 256 * 128 + self.rows * 128 + scale + 3 * 8

    def _fixed_bytes(self) -> int:
        few = min(self.rows, 64)
        amax = few * 32 if self.gated else 0
        staging = 8 * 2048 if self.rows == 128 else few * 128 if self.gated else 0
        epilogue = amax + staging
        partial = (self.split - 1) * self.rows * 256 * 4
        return 16 + 48 + 128 + epilogue + partial

    def defines(self) -> dict[str, int]:
        """Macros of the source."""
        return {
            "ROWS": self.rows,
            "GATED": int(self.gated),
            "STAGES": self.stages,
            "SPLIT": self.split,
            "KBLOCKS": -(-self.K // 128),
            "UNITS_N": self.units_n,
            "N_OUT": self.n_out,
            "W_ROWS": self.w_rows,
            "W_SCALE_ROWS": -(-self.w_rows // 128),
            "EARLY": int(not self.gated),
        }

    def compile(self) -> bytes:
        """Machine code."""
        sizes = [n for n in (8, 16, 32, 64, 128) if n <= self.rows and (n > 8 or self.rows == 8)]
        source = _SOURCE.read_text().replace("//WGMMA", "".join(map(_wgmma, sizes)))
        return compile_cubin(source, self.defines())


def _wgmma(n: int) -> str:
    """`wgmma(d, a, b, accumulate)` for m64, `n` columns and k32 of E4M3."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], u64 a, u64 b, int on) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, "\n'
        f'    "%{count}, %{count + 1}, p, 1, 1;\\n}}" : {operands} : "l"(a), "l"(b), "r"(on));\n'
        "}\n"
    )


@cache
def _kernel(config: GemmConfig, device: int) -> Kernel:
    return Kernel.load(
        config.compile(),
        "fp8_grouped_gemm",
        threads=THREADS,
        shared_bytes=config.shared_bytes,
        cluster=config.split,
    )


class GroupedGemm:
    """A grouped GEMM over fixed weights and buffers; a call launches one kernel.

    Args:
        config: the kernel.
        weight: float8_e4m3fn [E, w_rows, K] contiguous.
        weight_scale: float32 [E, ceil(w_rows / 128), ceil(K / 128)] contiguous.
        x: float8_e4m3fn [rows, >= K], rows in the order of the experts.
        x_scale: float32 [ceil(K / 128), row stride].
        tiles: int32 [max_tiles, 4], runs of at most `config.rows` rows.
        tile_count: int32 [1].
        units_taken: int32 [1], 0 before each call.
        out: [rows, n_out] float8_e4m3fn if gated, else bfloat16.
        out_scale: float32 [n_out / 128, row stride], the stride of `x_scale`, if gated; else None.
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
    ) -> None:
        assert weight.shape[1:] == (config.w_rows, config.K)
        assert all(t.is_contiguous() for t in (weight, weight_scale, out))
        assert weight_scale.shape[1:] == (-(-config.w_rows // 128), -(-config.K // 128))
        index = weight.device.index or 0
        self.kernel = _kernel(config, index)
        self.kept = (weight, weight_scale, x, x_scale, tiles, tile_count, units_taken)
        self.written = (out, out_scale)
        bytes_of_x = x.view(torch.uint8)[:, : config.K]
        boxes = [min(rows, config.rows) for rows in (16, 32, 64, 128)]
        x_map = {rows: tensor_map(bytes_of_x, box=(rows, 128)) for rows in set(boxes)}
        w_map = tensor_map(weight.view(torch.uint8).flatten(0, 1), box=(128, 128))
        assert x_scale.stride(1) == 1
        assert out_scale is None or out_scale.stride(0) == x_scale.stride(0)
        pointers = [weight_scale, x_scale, tiles, tile_count, out]
        self.arguments = [
            w_map,
            (TensorMap * 4)(*(x_map[rows] for rows in boxes)),
            *(ctypes.c_void_p(t.data_ptr()) for t in pointers),
            ctypes.c_void_p(0 if out_scale is None else out_scale.data_ptr()),
            ctypes.c_int(x_scale.stride(0)),
            ctypes.c_void_p(units_taken.data_ptr()),
        ]
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        most = tiles.shape[0] * config.units_n * config.split
        self.blocks = min(sms // config.split * config.split, most)

    def __call__(self) -> None:
        """Launch on the current stream."""
        self.kernel.launch(self.blocks, self.arguments)
