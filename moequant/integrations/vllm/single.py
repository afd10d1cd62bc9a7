"""Parameters for checkpoints with a tensor for each expert, as every dialect but gpt-oss has them.

For a tensor that the dialect calls `suffix`, such as `weight_packed`:

    w13_suffix   [E, 2 * rows, ...]   gate's rows, then up's; up alone where there is no gate
    w2_suffix    [E, rows, ...]       down's
    w13_suffix   [E, 2]               one number for each matrix; [E] of w2
    w13_suffix   [E, 2]               the logical shape, of the last matrix loaded; not read

with the dtype of the file. vLLM's loader cuts gate and up by rows, down by columns, and scales with
them; a parameter's `quant_method` tells it how scales lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats import QuantizedWeight, TensorSpec, get_format
from moequant.formats.base import WHOLE
from moequant.integrations.vllm.checked_tensors import as_stored
from moequant.integrations.vllm.stored import ONE_A_MATRIX, StoredExperts
from moequant.runtime import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from moequant.act_fn import ActFn

_GATE, _DOWN = "w1", "w2"
"""vLLM's `shard_id`."""


class SingleExperts(StoredExperts):
    """See the module."""

    def _create(self, layer: nn.Module) -> None:
        """As StoredExperts."""
        s = self.sizes
        whole = s.intermediate * s.tp_size
        here = {
            "w13": self._specs(s.intermediate, s.hidden),
            "w2": self._specs(s.hidden, s.intermediate),
        }
        files = {"w13": self._specs(whole, s.hidden), "w2": self._specs(s.hidden, whole)}
        for group, specs in here.items():
            for suffix, spec in specs.items():
                self._add(layer, group, suffix, spec, files[group][suffix])

    def weights(self, layer: nn.Module, act_fn: ActFn, *, input_scales: bool) -> ExpertWeights:
        """As StoredExperts."""
        first = ("gate", "up") if self.sizes.gated else ("up",)
        projections = {
            name: self._projection(layer, "w13", half, name) for half, name in enumerate(first)
        }
        projections["down"] = self._projection(layer, "w2", 0, "down")
        scales = self._input_scales(layer) if input_scales else {}
        return ExpertWeights.of(projections, act_fn, **scales)

    def _specs(self, N: int, K: int) -> dict[str, TensorSpec]:
        """What a weight [N, K] and its activations have in the files, by suffix."""
        specs = self.scheme.encoding.specs(self.name, (N, K))
        named = dict(zip(self.scheme.encoding.suffixes, specs.values(), strict=True))
        if self.scheme.input_scale is not None:
            named[self.scheme.input_scale.suffix] = TensorSpec(dtype=torch.float32, shape=())
        return named

    def _add(
        self,
        layer: nn.Module,
        group: str,
        suffix: str,
        here: TensorSpec,
        file: TensorSpec,
    ) -> None:
        """Register the parameter of one tensor of all experts."""
        E, halves = self.sizes.experts, self.sizes.halves if group == "w13" else 1
        if _is_number(here):
            shape: tuple[int, ...] = (E, halves) if group == "w13" else (E,)
        elif _is_logical_shape(here):
            shape = (E, *here.shape)
        else:
            shape = (E, halves * here.shape[0], *here.shape[1:])
        parameter = f"{group}_{suffix}"
        self._register(
            layer,
            parameter,
            torch.zeros(shape, dtype=here.dtype),
            None if _is_logical_shape(here) else E * halves,
            quant_method=self._quant_method(here),
            weight_loader=self._checked(parameter, file),
        )

    def _quant_method(self, spec: TensorSpec) -> str:
        """What vLLM's loader is told of a scale: a value of `FusedMoeWeightScaleSupported`."""
        rows, columns = get_format(self.scheme.format).block
        if _is_number(spec):
            return ONE_A_MATRIX
        if columns == WHOLE:
            return "channel"
        return "block" if rows > 1 else "group"

    def _checked(self, parameter: str, file: TensorSpec) -> Callable[..., object]:
        """The loader of vLLM for one parameter, which gets tensors as they must be."""
        scale = self.scheme.input_scale
        is_input_scale = scale is not None and parameter.partition("_")[2] == scale.suffix

        def load(
            param: Tensor,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            take = self._take_input_scale if is_input_scale else self._filling.loader
            name = f"{weight_name} ({shard_id} of expert {expert_id})"
            tensor = as_stored(name, loaded_weight, file)
            done = bool(take(param, tensor, weight_name, shard_id, expert_id, return_success=True))
            if done:
                self._note(parameter, (shard_id, expert_id))
            return done if return_success else None

        return load

    def _take_input_scale(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool,
    ) -> bool:
        """In place of vLLM's loader, which keeps the last of gate's and up's: keeps both."""
        local = self._filling.layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local == -1:
            return False
        place = param.data[local]
        (place if shard_id == _DOWN else place[0 if shard_id == _GATE else 1]).copy_(loaded_weight)
        return True

    def _projection(self, layer: nn.Module, group: str, half: int, name: str) -> QuantizedWeight:
        """One projection of all experts, decoded where its parameters are."""
        s = self.sizes
        N, K = (s.intermediate, s.hidden) if group == "w13" else (s.hidden, s.intermediate)
        specs = self.scheme.encoding.specs(self.name, (N, K))
        parts: dict[str, Tensor] = {}
        for suffix, spec in zip(self.scheme.encoding.suffixes, specs.values(), strict=True):
            tensor = getattr(layer, f"{group}_{suffix}").data
            if _is_number(spec):
                # On the host, where their values are read.
                parts[suffix] = tensor.reshape(s.experts, -1)[:, half].cpu()
            elif not _is_logical_shape(spec):
                rows = spec.shape[0]
                parts[suffix] = tensor[:, half * rows : (half + 1) * rows]
        return self._decode(parts, torch.Size((s.experts, N, K)), name)

    def _decode(self, parts: Mapping[str, Tensor], shape: torch.Size, name: str) -> QuantizedWeight:
        """The weights in `parts`, [E, ...] by suffix, which are changed where memory differs."""
        codes, scale = (parts[suffix] for suffix in self.scheme.encoding.suffixes[:2])
        decoded = [self._decode_expert(parts, e, name) for e in range(shape[0])]
        global_scale = None
        one_a_matrix = scale.ndim == 1
        if one_a_matrix:
            scale = torch.stack([q.scale for q in decoded]).to(codes.device)
        for e, q in enumerate(decoded):
            _put(codes[e], q.qdata)
            _put(scale[e], q.scale)
        if decoded[0].global_scale is not None:
            numbers = [q.global_scale for q in decoded if q.global_scale is not None]
            global_scale = torch.stack(numbers).to(codes.device)
        return QuantizedWeight(
            format=self.scheme.format,
            qdata=codes.view(decoded[0].qdata.dtype),
            scale=scale.view(decoded[0].scale.dtype),
            global_scale=global_scale,
            shape=shape,
        )

    def _decode_expert(self, parts: Mapping[str, Tensor], e: int, name: str) -> QuantizedWeight:
        """The weight of one expert in `parts`, which messages call by `name` and its number."""
        module = f"{self.name}, {name} of this rank's expert {e}"
        tensors = {f"{module}.{suffix}": part[e] for suffix, part in parts.items()}
        return self.scheme.encoding.decode(module, tensors)

    def _input_scales(self, layer: nn.Module) -> dict[str, Tensor]:
        """Static scales [E], which multiply; of gate's and up's the larger, as `load_experts`."""
        scale = self.scheme.input_scale
        assert scale is not None
        stored = {group: getattr(layer, f"{group}_{scale.suffix}") for group in ("w13", "w2")}
        scales = {group: scale.multiplier(value.data) for group, value in stored.items()}
        return {
            "gate_up_input_scale": scales["w13"].amax(1),
            "down_input_scale": scales["w2"].contiguous(),
        }


def _is_number(spec: TensorSpec) -> bool:
    """Whether a tensor holds one number for the weight; a single block's scale is [1, 1]."""
    return spec.shape in ((), (1,))


def _is_logical_shape(spec: TensorSpec) -> bool:
    """Whether a tensor holds the shape of the whole weight, which some files leave out."""
    return len(spec.shape) == 1 and not _is_number(spec)


def _put(place: Tensor, decoded: Tensor) -> None:
    """Make the bytes of `place` those of `decoded`, unless it is a view of them."""
    if decoded.data_ptr() != place.data_ptr():
        place.view(decoded.dtype).copy_(decoded)
