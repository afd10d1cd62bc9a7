"""A floor: the time that no kernel can beat, from the bytes that must move and the operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.benchmarks.cuda_timing import Ceilings
    from moequant.benchmarks.layers import Inputs
    from moequant.runtime import ExpertWeights


def floor_us(bytes_moved: float, flop: float, ceilings: Ceilings, *, fp8: bool) -> float:
    """The longer of the times to move the bytes and to do the operations; without launches.

    With `fp8`, the rate is that of FP8 if the GPU has it; else that of BF16.
    """
    rate = ceilings.fp8_tflops if fp8 and ceilings.fp8_tflops else ceilings.bf16_tflops
    return max(bytes_moved / ceilings.read_tb_per_s, flop / rate) / 1e6


def work_of(weights: ExpertWeights, inputs: Sequence[Inputs]) -> tuple[float, float]:
    """Bytes and operations of a call, as means over `inputs` with their routing.

    The bytes are the weights of the experts chosen, hidden states in, and output out; the
    operations are the multiplications and additions of all projections of every token-expert pair.
    """
    expert_bytes = sum(tensor.nbytes for tensor in weights.tensors().values()) / weights.experts
    moved = [
        len(set(call.ids.flatten().tolist())) * expert_bytes
        + 2 * call.hidden.nbytes  # output like input
        for call in inputs
    ]
    pair = 2 * len(weights.projections()) * weights.hidden * weights.intermediate
    flop = [call.ids.numel() * pair for call in inputs]
    return sum(moved) / len(moved), sum(flop) / len(flop)
