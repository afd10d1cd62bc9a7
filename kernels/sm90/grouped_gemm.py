"""A family of grouped GEMMs for SM90: how one is compiled, and launched.

A family is a CUDA source around pipeline.cuh and a subclass of `GemmConfig`. Its kernel takes the
arguments that `GroupedGemm` lists, then its own.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from moequant.cores import available_cores
from moequant.kernels.calls import MAX_PAIRS
from moequant.kernels.cuda_driver import (
    Kernel,
    Launch,
    TensorMap,
    compile_cubin,
    pointer,
    tensor_map,
)
from moequant.kernels.sm90.source import read_source, tile_classes, wgmma

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moequant.act_fn import ActFn
    from moequant.kernels.routing import SortedRouting

ROUTED_PAIRS = 32
"""Up to so many token-expert pairs, the first GEMM of a call finds its tiles by itself."""

ACT_FNS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2", "swiglustep", "situ")
"""The activation functions in the order of the macro ACT, see activation.cuh."""

_THREADS = 384
_COMPILERS = min(16, available_cores())
"""Threads that compile; the calls of a model have about 20 kernels."""
_SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, kw_only=True)
class GemmConfig(ABC):
    """What one compiled kernel is for.

    Attributes:
        act: one of ACT_FNS, applied to the sums; None for the sums themselves.
        gated: the weights are gate and up; with an `act` only.
        limited: whether what goes into the activation function is clamped.
        bias: whether there is one to add.
        gather: T where x is of tokens, not of rows; 0 where not.
        routed: tiles are made from ids, at most ROUTED_PAIRS, and weights are not waited for.
        rows: most rows of a tile.
        split: CTAs that share a unit along K.
        pair: whether CTAs of a cluster have two tiles and share weights.
        K: columns of the weights.
        n_out: columns of the output: I, padded, or H.
    """

    act: str | None
    gated: bool = False
    limited: bool = False
    bias: bool = False
    gather: int = 0
    routed: bool = False
    rows: int
    split: int = 1
    pair: bool = False
    K: int
    n_out: int

    path: ClassVar[Path]
    """The source, whose kernel has the name of the file."""
    a_in_registers: ClassVar[bool]
    """Whether the first operand of WGMMA comes from registers."""
    x_bytes: ClassVar[int] = 1
    """Of an element of x: 1 for E4M3, 2 for bfloat16."""

    @property
    @abstractmethod
    def classes(self) -> list[int]:
        """Rows that a tile is computed as: the smallest that holds its own; `rows` is the last."""

    @abstractmethod
    def _stage_bytes(self) -> int:
        """Shared memory of a stage, without its two barriers."""

    def _own_bytes(self) -> int:
        """Shared memory beside stages and what pipeline.cuh needs."""
        return 0

    @property
    def w_rows(self) -> int:
        """Weight rows of an expert."""
        return self.n_out * (2 if self.gated else 1)

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
        return (_SHARED_LIMIT - self._fixed_bytes()) // (self._stage_bytes() + 2 * 8)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.stages * (self._stage_bytes() + 2 * 8) + self._fixed_bytes()

    def _fixed_bytes(self) -> int:
        barriers = 16 + 128 + 128  # and units, with room to align them
        partial = (self.split - 1) * self.rows * 256 * 4
        tiles = (ROUTED_PAIRS + 1) * 16 if self.routed else 0
        return barriers + partial + tiles + self._own_bytes()

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
            "ROUTED_PAIRS": ROUTED_PAIRS,
            "STAGES": self.stages,
            "SHARED_BYTES": self.shared_bytes,
            "SPLIT": self.split,
            "PAIR": 1 + self.pair,
            "K": self.K,
            "KBLOCKS": -(-self.K // 128),
            "UNITS_N": self.units_n,
            "N_OUT": self.n_out,
            "W_ROWS": self.w_rows,
            "EARLY": int(self.routed or self.act is None),
        }

    def source(self) -> str:
        """C++ without the macros."""
        products = "".join(
            wgmma(n, a_in_registers=self.a_in_registers, bf16=self.x_bytes == 2)
            for n in self.classes
        )
        return read_source(self.path).replace("//CLASSES", tile_classes(self.classes) + products)


def classes_of(tile_rows: Sequence[int], rows: int) -> list[int]:
    """Those of `tile_rows` that a tile of at most `rows` is computed as: 8 only with up to 32."""
    least = 8 if rows <= 32 else 16
    return [n for n in tile_rows if least <= n <= rows]


@cache
def _cubin(config: GemmConfig) -> bytes:
    return compile_cubin(config.source(), config.defines())


def compile_ahead(configs: Iterable[GemmConfig]) -> None:
    """Compile kernels that later calls will launch, several at once.

    A kernel takes about half a second of one core. Python's lock is free while NVRTC compiles, and
    NVRTC 13 compiles for several threads at once.

    Raises:
        MoequantError: the compiler refuses one; carries its log.
    """
    with ThreadPoolExecutor(_COMPILERS, thread_name_prefix="nvrtc") as pool:
        for _ in pool.map(_cubin, dict.fromkeys(configs)):
            pass


@cache
def _kernel(config: GemmConfig, device: int) -> Kernel:
    return Kernel.load(
        _cubin(config),
        config.path.stem,
        threads=_THREADS,
        shared_bytes=config.shared_bytes,
        cluster=config.cluster,
    )


@cache
def _clusters(config: GemmConfig, device: int) -> int:
    """Clusters, or single CTAs, that run at once."""
    if config.cluster == 1:
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _kernel(config, device).most_clusters()


class ActArguments(ctypes.Structure):
    """The numbers of an activation function; 0 for those it does not have."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("alpha", "limit", "beta", "linear_beta"))


class RoutingArguments(ctypes.Structure):
    """The routing of a call, for a kernel that finds its tiles by itself; see routing.cuh."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("expert_map", ctypes.c_void_p),
        ("pairs", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("map_size", ctypes.c_int),
        ("wide_ids", ctypes.c_int),
        ("wide_map", ctypes.c_int),
    )


class GroupedGemm:
    """A grouped GEMM over fixed weights and buffers; a call launches one kernel.

    It keeps no tensor: what it is given must outlive it.

    Args:
        config: the kernel.
        x: [rows, K], rows in the order of the experts; [M, K] if it gathers; None if each call
            says where the tokens are, see `gather_from`.
        x_scale: float32, as the family has it; None for bfloat16.
        routing: tiles of at most `config.rows` rows.
        units_taken: int32 [1], 0 before each call.
        out: [rows, n_out].
        experts: E.
        bias: float32 [E, w_rows] contiguous, if `config` has one; else None.
        act_fn: the activation function, whose name `config` has too.
        own: makes the family's own arguments.
    """

    def __init__(
        self,
        config: GemmConfig,
        *,
        x: Tensor | None,
        x_scale: Tensor | None,
        routing: SortedRouting,
        units_taken: Tensor,
        out: Tensor,
        experts: int,
        bias: Tensor | None,
        act_fn: ActFn,
        own: Callable[[], list[Any]],
    ) -> None:
        assert config.gather or x is not None
        if config.gather:  # the kernel's offsets of tokens have 32 bits
            assert MAX_PAIRS // config.gather * config.K * config.x_bytes <= 2**32
        assert out.is_contiguous()
        assert (bias is not None) == config.bias
        assert bias is None or (bias.is_contiguous() and bias.shape == (experts, config.w_rows))
        maps = [TensorMap() for _ in config.classes]
        if x is not None:
            bytes_of_x = x.view(torch.uint8)[:, : config.K * config.x_bytes]
            maps = [tensor_map(bytes_of_x, box=(n, 128)) for n in config.classes]
        self._x = pointer(x)
        self._routing = RoutingArguments(map_size=-1, experts=experts)
        index = out.device.index or 0
        units = routing.tiles.shape[0] * -(-config.units_n // (1 + config.pair))
        self._launch = Launch(
            _kernel(config, index),
            min(_clusters(config, index), units) * config.cluster,
            [
                pointer(routing.tiles),
                pointer(routing.tile_count),
                pointer(units_taken),
                self._x,
                pointer(x_scale),
                pointer(routing.pair_of_row),
                pointer(out),
                pointer(bias),
                ActArguments(
                    act_fn.alpha, act_fn.limit or 0.0, act_fn.beta, act_fn.linear_beta or 0.0
                ),
                self._routing,
                (TensorMap * len(maps))(*maps),
                *own(),
            ],
        )

    def gather_from(self, x: Tensor) -> None:
        """Where a gathering kernel finds the tokens of its next call, [M, K] contiguous."""
        self._x.value = x.data_ptr()

    def route(self, topk_ids: Tensor, expert_map: Tensor | None) -> None:
        """Where a routed kernel finds the ids of its next call, contiguous int32 or int64."""
        at = self._routing
        at.ids = topk_ids.data_ptr()
        at.pairs = topk_ids.numel()
        at.wide_ids = int(topk_ids.dtype == torch.int64)
        at.map_size = -1
        if expert_map is not None:
            at.expert_map = expert_map.data_ptr()
            at.map_size = expert_map.shape[0]
            at.wide_map = int(expert_map.dtype == torch.int64)

    def __call__(self, stream: int) -> None:
        """Launch on a stream of CUDA's."""
        self._launch(stream)
