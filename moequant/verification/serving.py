"""Run layers on the device and backend that serve them, and compare with the CPU reference.

The backend gets what a model gives it: hidden states in bfloat16, and activations quantized as the
format's GEMM does. `torch_reference`, which `layers` compares with an independent evaluation, gets
the same on the CPU and computes in float32. Both quantize hidden states to the same bits. The norm
of the difference is limited by what is left of it:

* A backend may round to bfloat16 what lies between the GEMMs, each expert's result and the output.
  Each rounding costs 2**-9 / sqrt(3) of the norm, and errors of mixed sign add up as squares: five
  roundings, of gate, up, their product, an expert's result and the output, make 2**-9 * 1.3. The
  limit is three times that.
* Where activations are quantized to E4M3, an error d before the quantization between the GEMMs
  changes a code with probability d / ulp, and each change costs an ulp, of 2**-3.5 on average:
  sqrt(d * ulp). Tensor cores add FP8 products with about 14 bits, and gate and up may be rounded to
  bfloat16. That makes d = 2**-9 each and 1.9 % together. 16 tokens change few codes, so that the
  error scatters; the limit is a little more than twice that.
* Where all tokens share a scale, so does an error of the value that makes it: at most 2**-8 of all
  values, which changes as few codes again.
* Where they are quantized to MXFP8, the ulp and so the limit are the same. A scale, a power of two,
  seldom changes, and E4M3 is as exact at twice the scale.
* Where they are quantized to FP4, tensor cores add exact products in float32, so that d is only
  gate and up in bfloat16: 2**-9 of a value on average. For silu(gate) * up of N(0, 1), the step of
  E2M1 is 0.21 of the values with NVFP4's scales and 0.33 with MXFP4's, which makes sqrt(d * step)
  2.0 % and 2.5 %. A changed scale quantizes its whole group anew: NVFP4 changes 3 % of them, its
  token's among the causes, and each costs 12.5 %; MXFP4 d / log(2) = 0.3 %, each 25 %. Together
  3.0 % for both, as measured over 4096 rows of 256. The limit is twice that. The largest of 1000
  errors of 66 rows was 4.1 % and 5.7 %. In four rows, those of a token, few scales change and each
  is much: the largest of 16500 errors was 8.6 % and 15.3 %, so that one token has its own limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.device import usable_device
from moequant.errors import ArgumentError, UnsupportedError, unknown_name
from moequant.runtime import FusedExperts, select
from moequant.runtime.activations import FP4_SCHEMES
from moequant.runtime.backends import Workload, backends
from moequant.runtime.packing import scheme_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from moequant.runtime import ExpertWeights
    from moequant.runtime.activations import ActivationsChoice
    from moequant.weights.converted import ConvertedCheckpoint

MOST_ROUNDING_ERROR = 2.0**-7
MOST_QUANTIZATION_ERROR = 2.0**-4.5
MOST_FP4_ERROR, MOST_FP4_TOKEN_ERROR = 2.0**-4, 2.0**-2.5
"""Of several tokens, and of one."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where layers are served.

    Attributes:
        device: the device.
        backend: name of a backend; None for the best on that device.
    """

    device: torch.device
    backend: str | None

    def check(
        self, converted: ConvertedCheckpoint, formats: Mapping[int, str], *, experts: int
    ) -> None:
        """Check that `experts` experts of every layer in `formats`, by layer, can run there.

        Raises:
            UnsupportedError: a layer cannot; says why, as `select`.
        """
        moe, stacked = converted.moe, converted.architecture.stacked
        for layer, format in formats.items():
            stated = converted.activations_of_experts(layer)
            workload = Workload(
                format=format,
                activations=stated or scheme_of(format, "format", static=False),
                experts=experts,
                hidden=moe.hidden,
                intermediate=moe.intermediate,
                device=self.device,
                act_fn=moe.act_fn_of(layer),
                bias=stacked is not None and stacked.biased,
            )
            select(workload, self.backend)

    def run(
        self,
        weights: ExpertWeights,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        activations: ActivationsChoice,
        expert_map: Tensor,
    ) -> tuple[str, Tensor]:
        """Run experts there.

        All tensors are on the CPU; see `FusedExperts` for their shapes.

        Returns:
            Name of the backend that ran them, and the output, [M, H] float64.

        Raises:
            UnsupportedError: no backend runs them there.
        """
        there = {name: tensor.to(self.device) for name, tensor in weights.tensors().items()}
        experts = FusedExperts(
            weights.replace(there),
            backend=self.backend,
            activations=activations,
            expert_map=expert_map.to(self.device),
        )
        inputs = (t.to(self.device) for t in (hidden, topk_weights, topk_ids))
        return experts.chosen_backend(), experts(*inputs).cpu().double()


def serving_on(
    device: torch.device | str, backend: str | None, *, runs_layers: bool
) -> Serving | None:
    """Where layers are served; None for the CPU's own backend, which is the reference.

    Raises:
        ArgumentError: a device or a backend is named, and no layer is to be run.
        UnsupportedError: there is no such device or backend here.
    """
    if backend is None and str(device) == "cpu":
        return None
    if not runs_layers:
        raise ArgumentError(
            f"layers = 0 runs no layer, so that nothing runs on device {str(device)!r} with "
            f"backend {backend!r}; run at least one layer, or leave device and backend out"
        )
    if backend is not None and backend not in backends():
        raise UnsupportedError(unknown_name("backend", backend, backends()))
    return Serving(device=usable_device(device), backend=backend)


def most_error(scheme: str, *, tokens: int) -> float:
    """The limit on ||y - reference|| / ||reference|| of a call.

    Args:
        scheme: of the activations, one of `moequant.runtime.activations.SCHEMES`.
        tokens: how many.
    """
    if scheme == "none":
        return MOST_ROUNDING_ERROR
    if scheme in FP4_SCHEMES:
        return MOST_FP4_TOKEN_ERROR if tokens == 1 else MOST_FP4_ERROR
    return MOST_QUANTIZATION_ERROR
