"""Four-bit weights x FP8 on Hopper: the kernels of moequant.kernels.sm90_w4a8."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moequant.errors import UnsupportedError
from moequant.kernels.sm90_w4a8 import int4_layout, mxfp4_group_scaled_layout, mxfp4_layout
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import why_not_kernels_for, why_not_sm90_nvrtc
from moequant.runtime.backends.layout import Layout
from moequant.runtime.backends.sm90 import Sm90Experts, common_fields, weights_of_panels
from moequant.runtime.backends.stacked import stack_biases

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload


class W4a8Panels(Layout):
    """Codes and scales in the order in which the kernels' threads read them.

    w13_panels  uint8 [E, panels, ceil(H / 128), PANEL_BYTES]  gate and up, or up alone
    w2_panels   uint8 [E, panels, ceil(I / 128), PANEL_BYTES]
    w13_bias    float32 [E, 2 * I], gate over up, or [E, I]
    w2_bias     float32 [E, H]

    As many bytes as the codes and scales have, but for what fills the last panel and block;
    `moequant.kernels.sm90_w4a8.int4_layout` and `mxfp4_layout` describe a panel.
    """

    name = "w4a8_panels"
    version = 1
    format: ClassVar[str] = "w4a8"
    panels: ClassVar[tuple[str, str]] = ("w13_panels", "w2_panels")
    """Names of the tensors of gate and up, and of down."""

    def _pack(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        return int4_layout.pack(weights)

    def _unpack(
        self, packed: Tensor, n_out: int, K: int, *, gated: bool
    ) -> list[tuple[Tensor, Tensor]]:
        return int4_layout.unpack(packed, n_out, gated=gated)

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """See `Layout.pack`."""
        if weights.format != self.format:
            raise UnsupportedError(
                f"the layout {self.name} holds {self.format}, but these weights are "
                f"{weights.format}; use another backend"
            )
        first = {name: (q.qdata, q.scale) for name, q in weights.projections().items()}
        down = {"down": first.pop("down")}
        biases = stack_biases(weights, weights.intermediate)
        w13, w2 = self.panels
        return {w13: self._pack(first), w2: self._pack(down), **biases}

    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """See `Layout.unpack`; codes and scales are copies."""
        I, H = workload.intermediate, workload.hidden
        w13, w2 = (tensors[name] for name in self.panels)
        first = self._unpack(w13, I, H, gated=workload.act_fn.gated)
        down = self._unpack(w2, H, I, gated=False)
        return weights_of_panels([(*w, None) for w in (*first, *down)], tensors, workload)


class Mxfp4Panels(W4a8Panels):
    """As `W4a8Panels`, of mxfp4: FP8 products want E8M0 scales folded into exponents.

    It does not hold weights whose scales lie further apart than that is exact.
    """

    name = "mxfp4_fp8_panels"
    version = 3
    format = "mxfp4"

    def _pack(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        return mxfp4_layout.pack(weights)

    def _unpack(
        self, packed: Tensor, n_out: int, K: int, *, gated: bool
    ) -> list[tuple[Tensor, Tensor]]:
        return mxfp4_layout.unpack(packed, n_out, K, gated=gated)


class Mxfp4GroupScaledPanels(W4a8Panels):
    """As `Mxfp4Panels`, for any scales: every group keeps its own.

    w13_group_scaled_panels, w2_group_scaled_panels  in place of w13_panels, w2_panels

    The names differ, because kernels would misread the one as the other.
    """

    name = "mxfp4_fp8_group_scaled_panels"
    version = 1
    why = "weights whose scales lie more than eleven octaves apart within a row"
    format = "mxfp4"
    panels = ("w13_group_scaled_panels", "w2_group_scaled_panels")

    def _pack(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        return mxfp4_group_scaled_layout.pack(weights)

    def _unpack(
        self, packed: Tensor, n_out: int, K: int, *, gated: bool
    ) -> list[tuple[Tensor, Tensor]]:
        return mxfp4_group_scaled_layout.unpack(packed, n_out, K, gated=gated)


class Sm90W4a8(Backend):
    """INT4 x FP8 GEMMs: codes decoded to E4M3 in registers, scales applied to sums in float32.

    So a weight counts as its code times its scale, exactly. Activations are quantized to FP8 per
    token, hidden states as `quantize_activations` does. The result of the activation function is
    rounded to bfloat16 before that, as is an expert's result, whatever the dtype of the hidden
    states; the sum over a token's experts is float32. Every activation function, with biases or
    without. Runs of one call are bitwise equal. Nothing is read on the host: an id that is out of
    range contributes nothing, like -1, and raises no error.
    """

    name = "sm90_w4a8"
    default_on = ("cuda",)
    formats: ClassVar[tuple[str, ...]] = ("w4a8",)
    layout: ClassVar[W4a8Panels] = W4a8Panels()

    def layout_of(self, tensors: Mapping[str, Tensor]) -> W4a8Panels:
        """See `Backend.layout_of`."""
        return self.layout

    def supports(self, workload: Workload) -> str | None:
        """Needs the format of its layout, activations in FP8 per token, SM90, triton and NVRTC."""
        reason = why_not_kernels_for(workload, self.formats, activations=("fp8_token",))
        return reason or why_not_sm90_nvrtc(workload.device)

    def serves(self, target: str, activations: str) -> Collection[str]:
        """See `Backend.serves`."""
        return (self.layout.format,) if (target, activations) == ("sm90", "fp8_token") else ()

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import (
            Mxfp4Fp8Weights,
            Mxfp4GroupScaledWeights,
            W4a8Weights,
        )

        layout = self.layout_of(tensors)
        kernels: dict[Layout, type[W4a8Weights]] = {
            W4a8Panels(): W4a8Weights,
            Mxfp4Panels(): Mxfp4Fp8Weights,
            Mxfp4GroupScaledPanels(): Mxfp4GroupScaledWeights,
        }
        w13, w2 = (tensors[name] for name in layout.panels)
        weights = kernels[layout](
            w13=w13,
            w2=w2,
            **common_fields(tensors, workload),
        )
        return Sm90Experts(self, tensors, workload=workload, kernel_weights=weights)


class Sm90Mxfp4Fp8(Sm90W4a8):
    """MXFP4 x FP8 GEMMs, for `activations="fp8_token"`; otherwise as `Sm90W4a8`.

    Codes and the E8M0 scales of their groups become E4M3 numbers and one scale for each row. That
    is exact where the scales of a row lie at most eleven octaves apart, but for those of groups of
    zeros. A layer of which that is not so is packed in a second layout, whose kernels add up the
    products of each group in float32, times the token's scale and then the group's. So it overflows
    or underflows only where products of dequantized float32 weights and activations do.
    """

    name = "sm90_mxfp4_fp8"
    formats = ("mxfp4",)
    layout = Mxfp4Panels()
    group_scaled: ClassVar[W4a8Panels] = Mxfp4GroupScaledPanels()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """See `Backend.layouts`."""
        return (self.layout, self.group_scaled)

    def layout_of(self, tensors: Mapping[str, Tensor]) -> W4a8Panels:
        """See `Backend.layout_of`."""
        return self.layout if self.layout.panels[0] in tensors else self.group_scaled
