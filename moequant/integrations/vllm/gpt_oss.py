"""Parameters for gpt-oss as it was released: experts stacked, rows of gate and up in turns.

    w13_weight        uint8 [E, 2 * I, H / 2]     w13_weight_scale  uint8 [E, 2 * I, H / 32]
    w2_weight         uint8 [E, H, I / 2]         w2_weight_scale   uint8 [E, H, I / 32]
    w13_bias          bfloat16 [E, 2 * I]         w2_bias           bfloat16 [E, H]

The model's code in vLLM cuts ranks' parts itself, by whole blocks of 32 columns, so that the last
rank may have fewer: I is rounded up to blocks, and what no rank loads stays zero, which adds
nothing. Of `w2_bias` only the first rank keeps the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, get_format
from moequant.integrations.vllm.checked_tensors import as_dtype, wrong_shape
from moequant.integrations.vllm.stored import StoredExperts
from moequant.runtime import ExpertWeights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from moequant.act_fn import ActFn


class GptOssExperts(StoredExperts):
    """See the module."""

    def _create(self, layer: nn.Module) -> None:
        """As StoredExperts."""
        s, format = self.sizes, get_format(self.scheme.format)
        rows = {"w13": s.halves * s.intermediate, "w2": s.hidden}
        columns = {"w13": s.hidden, "w2": s.intermediate}
        for group, N in rows.items():
            K = columns[group]
            shapes = {
                "weight": (s.experts, N, K // format.codes_per_byte),
                "weight_scale": (s.experts, N, K // format.block[1]),
            }
            for suffix, shape in shapes.items():
                self._add(layer, f"{group}_{suffix}", shape, torch.uint8)
            self._add(layer, f"{group}_bias", (s.experts, N), torch.bfloat16)

    def weights(self, layer: nn.Module, act_fn: ActFn, *, input_scales: bool) -> ExpertWeights:
        """As StoredExperts; there are no static scales."""
        assert not input_scales
        projections = {
            "gate": self._projection(layer, "w13", slice(0, None, 2)),
            "up": self._projection(layer, "w13", slice(1, None, 2)),
            "down": self._projection(layer, "w2", slice(None)),
        }
        bias = layer.get_parameter("w13_bias").data
        return ExpertWeights.of(
            projections,
            act_fn,
            gate_bias=bias[:, 0::2],
            up_bias=bias[:, 1::2],
            down_bias=layer.get_parameter("w2_bias").data,
        )

    def _add(
        self, layer: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        def load(
            param: Tensor,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str | None,
            expert_id: int | None,
            return_success: bool = False,
        ) -> object:
            if expert_id is not None:
                raise UnsupportedError(
                    f"{weight_name}: a tensor of expert {expert_id} alone, but in the dialect "
                    "gpt-oss the experts of a layer are one tensor; load the checkpoint from its "
                    "files"
                )
            take = self._filling.loader
            self._check_shape(weight_name, loaded_weight, parameter, shape)
            tensor = as_dtype(weight_name, loaded_weight, dtype)
            done = take(
                param, tensor, weight_name, shard_id, expert_id, return_success=return_success
            )
            self._note(parameter, None)
            return done

        data = torch.zeros(shape, dtype=dtype)
        self._register(layer, parameter, data, 1, quant_method="block", weight_loader=load)

    def _check_shape(
        self, name: str, tensor: Tensor, parameter: str, shape: tuple[int, ...]
    ) -> None:
        """Check what vLLM copies into a parameter: it takes fewer rows, or one expert for all.

        Raises:
            CheckpointError: it has another shape; a rank's part may be smaller where it is cut.
        """
        # Rows of gate and up, also of their bias, and columns of down; its bias is never cut.
        cut = 1 if parameter.startswith("w13") else 2
        may_be_smaller = self.sizes.tp_size > 1
        fits = tensor.ndim == len(shape) and all(
            size == whole or (may_be_smaller and place == cut and size < whole)
            for place, (size, whole) in enumerate(zip(tensor.shape, shape, strict=True))
        )
        if not fits:
            raise wrong_shape(name, tensor, shape)

    def _projection(self, layer: nn.Module, group: str, rows: slice) -> QuantizedWeight:
        format = get_format(self.scheme.format)
        codes = getattr(layer, f"{group}_weight").data[:, rows]
        scale = getattr(layer, f"{group}_weight_scale").data[:, rows]
        E, N, packed = codes.shape
        return QuantizedWeight(
            format=format.name,
            qdata=codes,
            scale=scale.view(format.scale_dtype),
            shape=torch.Size((E, N, packed * format.codes_per_byte)),
        )
