"""Fused experts on SM90, whatever the format: weights, and calls of them.

A family of kernels is a subclass of `Sm90Weights`. It makes an `Sm90Plan` for each size of calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from moequant.act_fn import SILU, ActFn
from moequant.errors import MoequantError, UnsupportedError
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import launch_sizes, part_tokens, run_in_parts
from moequant.kernels.kept_plans import KeptPlans
from moequant.kernels.kernel_sets import around_gemms
from moequant.kernels.portable.portable_grouped_gemm import Rows
from moequant.kernels.routing import Grouping, SortedRouting, max_rows
from moequant.kernels.sm90.buffers import Buffers
from moequant.kernels.sm90.grouped_gemm import ROUTED_PAIRS, GroupedGemm, compile_ahead
from moequant.kernels.sm90.plan import Sm90Plan
from moequant.kernels.sm90.quantize_permute import BESIDE_PAIRS, rows_a_program
from moequant.kernels.sm90.tiling import Tiling, Tilings, TuningProblem
from moequant.kernels.tensor_scale import TensorScale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moequant.kernels.sm90.grouped_gemm import GemmConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Sm90Weights(ABC):
    """Weights of E experts in the layout of a family, on a device of SM90.

    Attributes:
        w13: gate and up, or up alone; the first dimension is E.
        w2: down.
        hidden: H.
        intermediate: I.
        bias13: float32 [E, 2 * Ip], gate over up, or [E, Ip]; 0 where padded; None is 0.
        bias2: float32 [E, H]; None is 0.
        act_fn: the function between the GEMMs.
        static13: float32 [1], the scale of all tokens that gate and up are fed; None, and each
            token's is computed.
        static2: likewise of what down is fed; with `static13`, and of a family whose
            `quantizes_apart`.
        tensor_scale: whether calls compute such scales, of the largest magnitude of all tokens, and
            of all rows that down is fed; of a family whose `quantizes_apart`.
    """

    w13: Tensor
    w2: Tensor
    hidden: int
    intermediate: int
    bias13: Tensor | None = None
    bias2: Tensor | None = None
    act_fn: ActFn = SILU
    static13: Tensor | None = None
    static2: Tensor | None = None
    tensor_scale: bool = False
    _plans: KeptPlans[Sm90Plan] = field(default_factory=KeptPlans, init=False, repr=False)
    _tilings: dict[tuple[int, int], Tiling] = field(default_factory=dict, init=False, repr=False)
    _workspace_bytes: dict[tuple[int, int, Tiling | None], int] = field(
        default_factory=dict, init=False, repr=False
    )

    family: ClassVar[Tilings]
    quantizes: ClassVar[bool] = True
    """Whether activations are FP8; else bfloat16, and the first GEMM gathers the hidden states."""
    quantizes_apart: ClassVar[bool] = False
    """Whether the first GEMM leaves bfloat16, which a launch of its own quantizes."""

    def scale_shape(self, rows: int, columns: int, *, by_token: bool = False) -> tuple[int, ...]:
        """Of the scales of rows in the order of the experts, or of tokens as they come."""
        return (rows,) if self.quantizes_apart else ()

    @abstractmethod
    def gemm(
        self, common: dict[str, Any], buffers: Buffers, tiling: Tiling
    ) -> tuple[GemmConfig, Callable[[], list[Any]]]:
        """The kernel of a GEMM, and what makes its own arguments.

        Args:
            common: the fields that every `GemmConfig` has; `act` is None for the second GEMM.
            buffers: of the call.
            tiling: of the call.
        """

    def gemms(
        self, tokens: int, topk: int, tiling: Tiling, buffers: Buffers
    ) -> list[tuple[GemmConfig, Callable[[], list[Any]]]]:
        """As `gemm`, of gate and up, and of down, for calls of [tokens, topk] pairs."""
        act_fn = self.act_fn
        gate_up = {
            "act": act_fn.name,
            "gated": act_fn.gated,
            "limited": act_fn.limit is not None,
            "bias": self.bias13 is not None,
            "gather": topk if tiling.gather or not self.quantizes else 0,
            "routed": routed(tiling, tokens * topk),
            "split": tiling.split13,
            "K": self.hidden,
            "n_out": self.padded,
        }
        down = {
            "act": None,
            "bias": self.bias2 is not None,
            "split": tiling.split2,
            "K": self.intermediate,
            "n_out": self.hidden,
        }
        both = {"rows": tiling.rows, "pair": tiling.pair}
        return [self.gemm({**both, **own}, buffers, tiling) for own in (gate_up, down)]

    def gemm_configs(
        self, tokens: int, topk: int, tiling: Tiling | None = None
    ) -> list[GemmConfig]:
        """The kernels of the GEMMs of a call of [tokens, topk] pairs, without memory for it.

        By default with the tiling that such calls have.
        """
        if tokens * topk == 0:
            return []
        tokens = part_tokens(tokens, topk)
        tiling = tiling or self.tiling(tokens, topk)
        buffers = self.buffers(tokens, topk, tiling, WorkspaceArena())
        return [config for config, _ in self.gemms(tokens, topk, tiling, buffers)]

    @property
    def experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def padded(self) -> int:
        """Ip: columns between the GEMMs."""
        return self.intermediate

    def extra_rows(self, tiling: Tiling) -> int:
        """Rows that a tile may have beyond `tiling.rows`, instead of a tile of their own."""
        return 0

    def grouping(self, tiling: Tiling) -> Grouping:
        """How rows are cut into tiles."""
        return Grouping(
            experts=self.experts, tile_rows=tiling.rows, extra_rows=self.extra_rows(tiling)
        )

    def problem(self, tokens: int, topk: int) -> TuningProblem:
        """What a tiling is chosen for."""
        properties = torch.cuda.get_device_properties(self.w13.device)
        return TuningProblem(
            gpu=properties.name,
            sms=properties.multi_processor_count,
            experts=self.experts,
            hidden=self.hidden,
            intermediate=self.intermediate,
            topk=topk,
            tokens=tokens,
        )

    def tiling(self, tokens: int, topk: int) -> Tiling:
        """That of calls of [tokens, topk] pairs, at most MAX_PAIRS; the same every time."""
        known = self._tilings
        if (tokens, topk) not in known:
            known[tokens, topk] = self.family.choose(self.problem(tokens, topk))
        return known[tokens, topk]

    def tilings(self, tokens: int, topk: int) -> list[Tiling]:
        """Those worth timing; the first is what calls have now."""
        problem = self.problem(part_tokens(tokens, topk), topk)
        try:
            now = self.family.choose(problem)
        except MoequantError:  # of a broken table, which says to tune again
            now = self.family.choose(problem, of_user=False)
        return list(dict.fromkeys([now, *self.family.candidates(problem)]))

    def table(self, path: Path | None = None) -> Path:
        """Where tilings are kept: `path`, or the user's table, which calls look into.

        Raises:
            UnsupportedError: there is something else at `path`.
        """
        gpu = self.problem(1, 1).gpu
        if path is None:
            return self.family.user_table(gpu)
        if path.exists() and not self.family.is_table(path, gpu):
            raise UnsupportedError(
                f"{path} is there, and is no table of tilings of {self.family.name} on {gpu}; name "
                "another file, or remove it"
            )
        return path

    def keep(self, tokens: int, topk: int, tiling: Tiling, time_us: float, path: Path) -> None:
        """Write a tiling into the table at `path`, for calls of about that size."""
        self.family.write(self.problem(tokens, topk), tiling, time_us, path)

    def buffers(self, tokens: int, topk: int, tiling: Tiling, arena: WorkspaceArena) -> Buffers:
        """Those of a call of [tokens, topk] pairs, at most MAX_PAIRS."""
        pairs = tokens * topk
        H, I = self.hidden, self.padded
        rows = max_rows(pairs, self.experts, 1)
        first = tokens if tiling.gather else rows

        def quantized(rows: int, columns: int, *, by_token: bool) -> tuple[Tensor, Tensor] | None:
            if not self.quantizes:
                return None
            shape = self.scale_shape(rows, columns, by_token=by_token)
            codes = arena.empty(rows, columns, dtype=torch.float8_e4m3fn)
            return codes, arena.empty(*shape, dtype=torch.float32)

        routing = SortedRouting.allocate(pairs, self.grouping(tiling), empty=arena.empty)
        x = quantized(first, H, by_token=tiling.gather)
        of_tokens = scales = None
        if self.tensor_scale:
            one, other = (TensorScale.allocate(empty=arena.empty) for _ in range(2))
            scales = one, other
        if self.static13 is not None or scales is not None:
            of_tokens = Rows.allocate(
                "fp8_token", tokens, H, dtype=torch.float32, empty=arena.empty
            )
        apart = self.quantizes_apart or not self.quantizes
        act = arena.empty(rows, I, dtype=torch.bfloat16) if apart else None
        codes = quantized(rows, I, by_token=False)
        return Buffers(
            routing=routing,
            x=x and x[0],
            x_scale=x and x[1],
            tokens=of_tokens,
            scales=scales,
            act=act,
            codes=codes and codes[0],
            codes_scale=codes and codes[1],
            y=arena.empty(rows, H, dtype=torch.bfloat16),
        )

    def plan(self, tokens: int, topk: int, *, tiling: Tiling | None, workspace: Tensor) -> Sm90Plan:
        """What runs calls of exactly that size.

        Args:
            tokens: M; M * T is from 1 to MAX_PAIRS.
            topk: T.
            tiling: by default that of `self.tiling`.
            workspace: uint8, at least `workspace_bytes` with this tiling.
        """
        tiling = self.tiling(tokens, topk) if tiling is None else tiling
        self.family.check(tiling)
        b = self.buffers(tokens, topk, tiling, WorkspaceArena(workspace))
        (config13, own13), (config2, own2) = self.gemms(tokens, topk, tiling, b)
        gemm = partial(GroupedGemm, routing=b.routing, experts=self.experts, act_fn=self.act_fn)
        gate_up = gemm(
            config13,
            x=b.x,
            x_scale=b.x_scale,
            units_taken=b.routing.units_taken[:1],
            out=b.between,
            bias=self.bias13,
            own=own13,
        )
        down = gemm(
            config2,
            x=b.act if b.codes is None else b.codes,
            x_scale=b.codes_scale,
            units_taken=b.routing.units_taken[1:],
            out=b.y,
            bias=self.bias2,
            own=own2,
        )
        return Sm90Plan(
            buffers=b,
            grouping=self.grouping(tiling),
            gate_up=gate_up,
            down=down,
            gathers=tiling.gather,
            routed=routed(tiling, tokens * topk),
            static13=self.static13,
            static2=self.static2,
        )

    def workspace_bytes(self, tokens: int, topk: int, tiling: Tiling | None = None) -> int:
        """Scratch memory of a call of [tokens, topk] pairs, by default with its own tilings."""
        if tokens * topk == 0:
            return 0
        known = self._workspace_bytes
        if (tokens, topk, tiling) not in known:
            known[tokens, topk, tiling] = max(
                self._part_bytes(part, topk, tiling or self.tiling(part, topk))
                for part in launch_sizes(tokens, topk)
            )
        return known[tokens, topk, tiling]

    def _part_bytes(self, tokens: int, topk: int, tiling: Tiling) -> int:
        arena = WorkspaceArena()
        self.buffers(tokens, topk, tiling, arena)
        return arena.size_bytes

    def kernels_for(self, tokens: int, topk: int) -> tuple[object, ...]:
        """Equal for calls that run the same kernels.

        Triton compiles apart for numbers that are 1 or multiples of 16: here tokens, and strides of
        scales.
        """
        around = around_gemms(tokens, topk)
        tokens = part_tokens(tokens, topk)
        pairs = tokens * topk
        tiling = self.tiling(tokens, topk)
        scales = self.scale_shape(pairs, self.hidden)
        return (
            around,
            tiling,
            routed(tiling, pairs),
            pairs <= BESIDE_PAIRS,
            tokens == 1,
            tuple(number % 16 == 0 for number in (tokens, *scales[1:])),
            self._rows_quantized_at_once(tokens, pairs),
        )

    def _rows_quantized_at_once(self, tokens: int, pairs: int) -> tuple[int, ...]:
        """By a program of the kernels that quantize tokens, and rows between the GEMMs."""
        if not self.quantizes_apart:
            return ()
        return rows_a_program(tokens, self.hidden), rows_a_program(pairs, self.intermediate)

    def compile_ahead(self, tokens: Iterable[int], topk: int) -> None:
        """Compile the kernels of the GEMMs of calls of these tokens, several at once.

        Raises:
            MoequantError: the compiler refuses one.
        """
        compile_ahead(config for M in tokens for config in self.gemm_configs(M, topk))

    def compile_tilings(self, tokens: int, topk: int, tilings: Iterable[Tiling]) -> None:
        """Compile the kernels of the GEMMs of such a call with each tiling, several at once.

        Raises:
            MoequantError: the compiler refuses one.
        """
        compile_ahead(
            config for tiling in tilings for config in self.gemm_configs(tokens, topk, tiling)
        )

    def run(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        out: Tensor,
        workspace: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """Run the experts once. Nothing is read on the host.

        Each expert's result is rounded to bfloat16; their sum is float32. More than MAX_PAIRS
        token-expert pairs run in parts. What a call of a size needs beside the workspace is made in
        the first one, and kept for as long as calls have the same workspace.

        Args:
            hidden: [M, H] bfloat16, float16 or float32.
            topk_weights: [M, T] float32, bfloat16 or float16.
            topk_ids: [M, T] int32 or int64; an id that is no expert's, such as -1, contributes
                nothing.
            out: [M, H] contiguous bfloat16, float16 or float32, written.
            workspace: uint8, at least `workspace_bytes`, with any contents.
            expert_map: [global experts] int32 or int64, index here or -1.
            hidden_scale: where `hidden` is quantized, float8_e4m3fn, its scales: float32
                [M, ceil(H / 128)] of groups, or [M, 1] of tokens.
        """
        T = topk_ids.shape[1]

        def plan_for(tokens: int) -> Sm90Plan:
            return self._plans.get(
                (tokens, T),
                workspace,
                lambda: self.plan(tokens, T, tiling=None, workspace=workspace),
            )

        run_in_parts(
            plan_for,
            hidden,
            topk_weights,
            topk_ids,
            out=out,
            expert_map=expert_map,
            hidden_scale=hidden_scale,
        )


def routed(tiling: Tiling, pairs: int) -> bool:
    """Whether the first GEMM finds its tiles by itself."""
    return tiling.rows <= 16 and pairs <= ROUTED_PAIRS
