"""INT4 weights with one BF16 scale per 128 columns, for FP8 activations.

Engines decode the same checkpoint in two ways:

* plain, `code * scale`: transformers, SGLang and moequant's kernel;
* effective: vLLM's CUTLASS kernel. Its loader splits the scales [G] of an output row into one FP32
  row scale and G group scales in E4M3, and the kernel looks up each code in the group's table,
  `row_scale * e4m3(group_scale * code)`. `effective_weight` computes that.

Source of the effective weight: vLLM 0.33.0, `fused_moe/oracle/w4a8.py`,
`convert_bf16_scales_to_fp8`, and the dynamic per-token FP8 quantizer, whose smallest channel scale
is 1 / (448 * 512).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.formats.base import WEIGHTED, Format, QuantizedWeight
from moequant.formats.blocks import grouped, weighted_group_sum
from moequant.formats.elements import (
    E4M3_MAX,
    E4M3_SMALLEST,
    INT4,
    INT4_MAX,
    INT4_MIN,
    decode_int4,
    divide,
    encode_e4m3,
    encode_int4,
    unpack_nibbles,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GROUP = 128

CHANNEL_SCALE_MIN = 1.0 / (E4M3_MAX * 512)
TABLE_HEADROOM = 8.0
"""The loader moves this factor from group to row scale, so that -8 * group_scale fits E4M3."""
GROUP_SCALE_MAX = E4M3_MAX / TABLE_HEADROOM

# -8 times the largest scale must stay finite.
SCALE_MAX = torch.finfo(torch.bfloat16).max / -INT4_MIN
# 1 first: a tie keeps it. Wider or finer sets gain less than 0.03 points on N(0, 0.02).
SEARCH_FACTORS = tuple(n / 16 for n in (16, 15, 17, 14, 18, 13))
# One channel may carry nearly all of a group's weighted error: the input of a massive activation.
# Its weight is then worth a scale of its own, under which larger ones saturate: down to amax / 64.
WEIGHTED_FACTORS = (*SEARCH_FACTORS, *(n / 16 for n in (12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2)))
# Of the numbers of E4M3 beside the nearest one; with two on each side the errors of outputs of a
# trained model are 0.3 % smaller, with none 1.5 % larger.
NEAR_STEPS = (-1, 1)
LARGEST_CODE = 0x66
"""The E4M3 code of GROUP_SCALE_MAX."""


class W4A8(Format):
    """`w = code * scale`, codes -8..7, with scales that vLLM's loader splits exactly.

    The ideal step of a group puts its largest value of either sign one step beyond the codes:
    max(max(w) / 8, -min(w) / 9). Measured on N(0, 0.02): 10.40 % plain and 10.56 % effective
    relative error, against 10.60 and 10.75 % with amax / 8. Option `search = "mse"` multiplies the
    step by the factor from 13/16 .. 18/16 with the least squared error: 10.26 and 10.42 %. With
    `search = "weighted"` each squared error counts by the mean square of its input channel. With
    `search_range = "wide"` its factors go down to 2/16, and what a step is rounded to is chosen by
    that error, too, of the nearest number and its neighbours; but not for the row's largest, on
    which all others depend. "narrow" is the default with GPTQ, and of no effect on other searches.

    The row's largest step, rounded to BF16, gives the row scale as the loader would compute it.
    Each step divided by the row scale, rounded to E4M3 between 2**-9 and 56, gives the group scale,
    and `scale = bf16(row_scale * group_scale)`. `split_scale` recovers both exactly:

    * the largest group scale of a row is 56, and bf16(row_scale * 56) is the BF16 maximum that the
      row scale came from; if the loader's minimum sets the row scale instead, every scale is at
      most 448 times the minimum, so the minimum applies again;
    * rounding to BF16 changes a scale by at most 2**-8 of itself, while the loader's first rounding
      to E4M3 absorbs 2**-5: 8 * group_scale is a normal E4M3 number, at least 2**-6;
    * its second rounding, of 8 * group_scale / 8, is exact.

    So the plain and the effective scales differ by at most 2**-8, above and below the minimum, and
    the kernel adds only the rounding of its table. A rank of a tensor-parallel group that splits K
    has other row maxima; `effective_weight` models that.

    Rules: codes round to nearest even and saturate; -0 becomes 0. A zero group has zero codes and
    the smallest scale its row can have, so that it is never the row's maximum. A scale is a normal
    BF16 number, at least 2**-21 / 7 and about 1 / 28672 of its row's largest: weights below half of
    that become zero, both plain and effective.

    Error: at most half a scale for weights from -8.5 to 7.5 scales; those beyond saturate.
    """

    name = "w4a8"
    summary = "INT4, one BF16 scale per 128 columns, FP8 activations per token"
    block = (1, GROUP)
    element = INT4
    scale_dtype = torch.bfloat16
    activations = "fp8_token"
    ordinary_error = 0.1075
    least_scale = CHANNEL_SCALE_MIN / 8
    # Ours, rounded to E4M3 in a row; amax / 7 to amax / 8 clip less.
    reach = (-9 * 17 / 16, 8 * 17 / 16)
    options = {  # noqa: RUF012
        "search": ("none", "mse", "weighted"),
        "search_range": ("wide", "narrow"),
    }
    gptq_options = {"search_range": "narrow"}  # noqa: RUF012
    warned_options = {  # noqa: RUF012
        ("search", "mse"): "from 0.270 to 0.291"
    }

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        groups = grouped(w, GROUP)
        step = _step(groups)
        wide = options["search"] == WEIGHTED and options["search_range"] == "wide"
        if options["search"] != "none":
            factors = WEIGHTED_FACTORS if wide else SEARCH_FACTORS
            step = step * _best_factor(groups, step, factors, importance)
        scale = _best_scale(groups, step, importance) if wide else _scale_of(step)
        return encode_int4(groups / scale.float().unsqueeze(-1)).reshape(w.shape), scale


def effective_weight(q: QuantizedWeight, *, k_shards: int = 1) -> Tensor:
    """The weight that vLLM's CUTLASS kernel uses: `row_scale * e4m3(group_scale * code)`.

    With tensor parallelism the loader of each rank splits the scales of its own columns. A down
    projection on `k_shards` ranks therefore has other row scales, and group scales rounded once
    more: 10.70, 10.81 and 10.87 % relative error with 2, 4 and 8 ranks, and 10.56 % with one
    (N(0, 0.02), K 4096).

    Args:
        q: a w4a8 weight [..., N, K].
        k_shards: ranks that K is split over.

    Returns:
        [..., N, K] float32.

    Raises:
        UnsupportedError: another format, or K / 128 is not a multiple of `k_shards`.
    """
    if q.format != W4A8.name:
        raise UnsupportedError(f"effective_weight needs w4a8, not {q.format}; use dequantize")
    *rows, G = q.scale.shape
    if k_shards < 1 or G % k_shards:
        raise UnsupportedError(
            f"K = {q.shape[-1]} has {G} groups of {GROUP}, but k_shards is {k_shards}; use a "
            f"divisor of {G}"
        )
    group_scale, row_scale = split_scale(q.scale.reshape(*rows, k_shards, G // k_shards))
    table = encode_e4m3(_codes(q) * group_scale.float().reshape(*rows, G, 1)).float()
    shards = table.reshape(*rows, k_shards, G // k_shards * GROUP)
    return (shards * row_scale.unsqueeze(-1)).reshape(q.shape)


def split_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split scales as vLLM's loader does; `join_scale` is the inverse for moequant's scales.

    Args:
        scale: [..., G] bfloat16, the scales of one output row last.

    Returns:
        group_scale [..., G] float8_e4m3fn, at most 56; row_scale [...] float32.
    """
    channel = _channel_scale(_row_max(scale.float().abs()))
    in_channel = encode_e4m3(scale.float() / channel.unsqueeze(-1))
    return encode_e4m3(in_channel.float() / TABLE_HEADROOM), channel * TABLE_HEADROOM


def join_scale(group_scale: Tensor, row_scale: Tensor) -> Tensor:
    """Scales [..., G] bfloat16 from group scales [..., G] and row scales [...]."""
    return (group_scale.float() * row_scale.unsqueeze(-1)).bfloat16()


def _codes(q: QuantizedWeight) -> Tensor:
    """Codes as float32 [..., N, K / 128, 128]."""
    return grouped(decode_int4(unpack_nibbles(q.qdata)), GROUP)


def _step(groups: Tensor) -> Tensor:
    """The ideal step of each group [..., 128], at least 0: float32 [...]."""
    low, high = torch.aminmax(groups, dim=-1)
    return torch.maximum(divide(high, INT4_MAX + 1), divide(low, INT4_MIN - 1))


def _best_factor(
    groups: Tensor, step: Tensor, factors: Sequence[float], importance: Tensor | None
) -> Tensor:
    """For each group [..., 128], the factor of `step` with the least error, as `_least`."""
    index = _least(groups, step, [step.new_full((), one) for one in factors], importance)
    return torch.tensor(factors, dtype=torch.float32, device=step.device)[index]


def _best_scale(groups: Tensor, step: Tensor, importance: Tensor | None) -> Tensor:
    """As `_scale_of`: for each group [..., 128] the scale near `step` with the least error."""
    row_scale = _row_scale(step)
    code = _group_scale(step, row_scale).view(torch.uint8).int()
    scales = [
        # Positive E4M3 numbers are ordered as their bytes.
        join_scale(near.clamp(1, LARGEST_CODE).byte().view(torch.float8_e4m3fn), row_scale)
        for near in (code, *(code + more for more in NEAR_STEPS))
    ]
    unit = _unit(step)
    index = _least(groups, step, [scale.float() / unit for scale in scales], importance)
    # The row's scales follow from its largest.
    index = torch.where(step == _row_max(step).unsqueeze(-1), 0, index)
    return torch.stack(scales).gather(0, index.unsqueeze(0)).squeeze(0)


def _least(
    groups: Tensor, step: Tensor, factors: Sequence[Tensor], importance: Tensor | None
) -> Tensor:
    """For each group [..., 128], the index of the factor of `step` with the least squared error.

    Errors count by `importance` [K] float32, or equally if that is None. A factor is one number,
    or one for each group [...]; of equals the first is taken.
    """
    x = groups / _unit(step).unsqueeze(-1)
    best = torch.zeros_like(step, dtype=torch.int64)
    least = torch.full_like(step, torch.inf)
    for index, factor in enumerate(factors):
        wide = factor.unsqueeze(-1)
        # In place, because a large expert takes hundreds of MB here.
        residual = (x / wide).round_().clamp_(INT4_MIN, INT4_MAX).mul_(wide).sub_(x)
        error = weighted_group_sum(residual.square_(), importance)
        best = torch.where(error < least, index, best)
        least = torch.minimum(error, least)
    return best


def _unit(step: Tensor) -> Tensor:
    """What weights of a group are divided by for the search; 1 for zeros."""
    return torch.where(step > 0, step, 1.0)


def _scale_of(step: Tensor) -> Tensor:
    """Scales [..., G] bfloat16 near the steps [..., G], such that `split_scale` is exact."""
    row_scale = _row_scale(step)
    return join_scale(_group_scale(step, row_scale), row_scale)


def _row_scale(step: Tensor) -> Tensor:
    """The row scale [...] that the loader computes where the steps [..., G] are scales."""
    row_max = _row_max(step).clamp(max=SCALE_MAX).bfloat16().float()
    return _channel_scale(row_max) * TABLE_HEADROOM


def _group_scale(step: Tensor, row_scale: Tensor) -> Tensor:
    """The group scales [..., G] float8_e4m3fn nearest to the steps."""
    in_row = step / row_scale.unsqueeze(-1)
    return encode_e4m3(in_row.clamp(E4M3_SMALLEST, GROUP_SCALE_MAX))


def _row_max(scale: Tensor) -> Tensor:
    """Maximum over the last axis of non-negative [..., G]; 0 where G is 0."""
    return torch.nn.functional.pad(scale, (0, 1)).amax(-1)


def _channel_scale(row_max: Tensor) -> Tensor:
    """The divisor that the loader applies to a row of scales before rounding them to E4M3."""
    return divide(row_max, E4M3_MAX).clamp(min=CHANNEL_SCALE_MIN)
