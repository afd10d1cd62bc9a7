"""The time that no kernel can beat: bytes that must move, and products that must be made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.benchmarks.cuda_timing import Ceilings
    from moequant.benchmarks.layers import Inputs
    from moequant.runtime import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What a call cannot do without, means over the inputs that were timed.

    Attributes:
        bytes_moved: weights of the experts chosen, hidden states in, output out.
        flop: multiplications and additions of the three projections of every slot.
    """

    bytes_moved: float
    flop: float

    def floor_us(self, ceilings: Ceilings, *, fp8: bool) -> float:
        """The longer of moving the bytes and making the products; launches are not in it.

        Args:
            ceilings: of the GPU.
            fp8: the products are FP8, if the GPU has it; else BF16.
        """
        rate = ceilings.fp8_tflops if fp8 and ceilings.fp8_tflops else ceilings.bf16_tflops
        return max(self.bytes_moved / ceilings.read_tb_per_s, self.flop / rate) / 1e6


def work_of(weights: ExpertWeights, inputs: Sequence[Inputs]) -> Roofline:
    """The work of `inputs`, from the routing they have."""
    size_bytes = sum(tensor.nbytes for tensor in weights.tensors().values()) / weights.experts
    moved = [
        _distinct(call.ids) * size_bytes + 2 * call.hidden.nbytes  # output like input
        for call in inputs
    ]
    matrices = len(weights.projections())
    slot = 2 * matrices * weights.hidden * weights.intermediate
    flop = [call.ids.numel() * slot for call in inputs]
    return Roofline(bytes_moved=sum(moved) / len(moved), flop=sum(flop) / len(flop))


def _distinct(ids: Tensor) -> int:
    return len(set(ids.flatten().tolist()))
