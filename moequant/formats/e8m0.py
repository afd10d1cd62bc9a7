"""Formats with E8M0 scales, powers of two, for 32 columns: how their exponent follows from amax.

| rule | exponent of the scale |
|---|---|
| even | as floor, one more where amax would round up to a power of two |
| floor | floor(log2(amax)) less the element's exponent |
| ceil | ceil(log2(amax / the element's largest number)) |

The element's exponent is that of the largest power of two it holds. "floor" is the conversion of
OCP Microscaling Formats v1.0, section 6.3, "ceil" Model-Optimizer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats.base import Format
from moequant.formats.blocks import grouped
from moequant.formats.elements import E8M0_BIAS, decode_e8m0, encode_e8m0

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ROUND_UP_BITS = {
    # From mantissa 1.75 up, and above 1.5, of which 6 is 4 times.
    "e2m1": {"floor": 0, "even": 0x200000, "ceil": 0x3FFFFF},
    # Above 1.75, of which 448 is 256 times. Four significant bits round up to 2 from 1.9375.
    "e4m3": {"floor": 0, "ceil": 0x1FFFFF},
}
"""What a rule adds to the bits of amax, by element: the exponent moves up."""
EXPONENTS = {"e2m1": 2, "e4m3": 8}
"""Of the largest power of two that an element holds."""
_GROUP = 32


class E8m0Format(Format):
    """`w = qdata * scale`; option `scale_rule` computes the scale's exponent from amax."""

    block = (1, _GROUP)
    scale_dtype = torch.float8_e8m0fnu
    activations = "none"
    least_scale = 2.0**-126

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        limit = self.element.float32_max
        groups = grouped(w.clamp(-limit, limit), _GROUP)
        scale = encode_e8m0(self._exponent(groups, options, importance))
        return self.element.encode(groups / decode_e8m0(scale)[..., None]).reshape(w.shape), scale

    def _exponent(
        self, groups: Tensor, options: Mapping[str, str], importance: Tensor | None
    ) -> Tensor:
        """Exponent of the scale of each group [..., N, K / 32, 32], int32; 0 for a zero group."""
        return self._exponent_by_rule(groups, options["scale_rule"])

    def _exponent_by_rule(self, groups: Tensor, rule: str) -> Tensor:
        amax = groups.abs().amax(-1)
        return torch.where(amax == 0, 0, scale_exponent(amax, self.element.name, rule))


def scale_exponent(amax: Tensor, element: str, rule: str) -> Tensor:
    """Exponent of the scale of groups with the largest magnitude `amax`.

    Denormal amax need no care: their exponent field reads as -127 or -126, and both end clamped.

    Args:
        amax: float32 [...], finite, not negative.
        element: name of the element of codes, "e2m1" or "e4m3".
        rule: "even", "floor" or "ceil", where the element has it.

    Returns:
        int32 [...], -127 to 127; -127 where `amax` is 0.
    """
    bits = amax.view(torch.int32) + ROUND_UP_BITS[element][rule]
    return ((bits >> 23) - 127 - EXPONENTS[element]).clamp(-E8M0_BIAS, E8M0_BIAS)
