"""FusedExperts: the routed experts of a layer as a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from moequant.errors import UnsupportedError
from moequant.runtime import experts_op
from moequant.runtime.backends import FusedBackend, Workload
from moequant.runtime.call import Call, parts_of, run_in_parts
from moequant.runtime.capture import capturing
from moequant.runtime.inputs import check_expert_map, check_input_scales, check_inputs
from moequant.runtime.kept_memory import make_kept
from moequant.runtime.select import check_takes_quantized, select
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from moequant.runtime.backends import Backend

MAX_TOKENS = 8192
"""Tokens of a part, unless told otherwise: what servers put in one step, and beyond which no kernel
gets faster."""


class FusedExperts(nn.Module):
    """The routed experts of one layer: prepare, a backend, finalize.

    For every token, the sum over its slots t of
    `topk_weights[t] * down(act_fn(gate(x), up(x)))` of expert `topk_ids[t]`.

    Inference only: nothing is recorded for autograd, whatever the mode outside, and autocast is off
    inside.

    The first call of some backends lays out the weights anew, which a CUDA graph cannot capture:
    call once before the capture, and capture again after the weights have changed or moved.

    Under torch.compile a call is one operator, moequant::fused_experts, that the graph keeps whole.
    It names the module by a number, so code that is compiled for one layer is compiled anew for the
    next, up to torch's recompile_limit: compile the whole model, or set
    torch._dynamo.config.allow_unspec_int_on_nn_module. torch.export is refused: what it saved would
    hold the number, and not the experts.

    The weights are buffers and part of `state_dict`. They move between devices as any module's do,
    but keep their dtypes: `.half()` on a model around this module leaves codes and scales alone.

    Args:
        weights: the experts here.
        backend: name of a backend; by default the best that runs them on their device.
        activations: "format" quantizes activations as the format's GEMM does, in front of either
            GEMM; "none" never does.
        expert_map: [global experts] int32 or int64, where the router's ids are not the indices of
            `weights`: index of each id, or -1 for an expert that is not here and contributes
            nothing. Not part of `state_dict`.
        max_tokens: more tokens than that run in parts, as equal as can be, one after the other; so
            memory is bounded whatever M is. Down to some hundred tokens a part the result does not
            depend on it; below, a backend may add up in another order.

    Raises:
        UnsupportedError: no backend runs this; says every backend's reason. Or an `expert_map`,
            `activations` or `max_tokens` that is not as above.
        CheckpointError: static scales of activations that are negative, not finite, or all 0.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        backend: str | None = None,
        activations: Literal["format", "none"] = "format",
        expert_map: Tensor | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        super().__init__()
        if not isinstance(weights, ExpertWeights):
            raise UnsupportedError(
                f"weights is {type(weights).__name__}, but wanted is ExpertWeights; load_experts "
                "makes them of a checkpoint"
            )
        for name, tensor in weights.tensors().items():
            self.register_buffer(name, tensor)
        self._weights = weights
        self._ready: _Ready | None = None
        self._handle = experts_op.handle_of(self)
        self.backend = backend
        self.max_tokens = max_tokens
        self.activations = activations
        self.expert_map: Tensor | None
        self.register_buffer("expert_map", None, persistent=False)
        self.expert_map = expert_map
        select(_workload(weights, activations), backend)
        check_input_scales(weights.input_scales())

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `max_tokens` and `expert_map` are checked as the constructor says."""
        if name == "max_tokens" and (type(value) is not int or value < 1):
            raise UnsupportedError(
                f"max_tokens is {value!r}, but wanted is a whole number, at least 1"
            )
        if name == "expert_map" and value is not None:
            self._check_map(value, values=not capturing(self.weights.device))
        super().__setattr__(name, value)

    @property
    def weights(self) -> ExpertWeights:
        """The experts, where they are now."""
        # Made and checked anew only where a buffer has been replaced: by a move, or by
        # load_state_dict(assign=True).
        tensors = {name: self._buffer(name) for name in self._weights.tensors()}
        if any(tensors[name] is not old for name, old in self._weights.tensors().items()):
            self._weights = self._weights.replace(tensors)
        return self._weights

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        expert_map: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activations: Literal["format", "none"] | None = None,
        hidden_scale: Tensor | None = None,
    ) -> Tensor:
        """Run the experts.

        Args:
            hidden_states: [M, H] bfloat16, float16 or float32; or float8_e4m3fn, with hidden_scale.
            topk_ids: [M, T] int32 or int64; -1 contributes nothing, nor does an id out of range,
                where it is not refused: in FusedBackends, which do not read ids on the host, and
                within the capture of a CUDA graph.
            topk_weights: [M, T] float32, bfloat16 or float16.
            expert_map: instead of the module's own; the same holds for indices in it.
            apply_router_weight_on_input: multiply the weight into the input, in float32, and not
                into the result; for T = 1 only.
            activations: instead of the module's own.
            hidden_scale: of hidden states that come quantized, as the weights' format quantizes
                them (`moequant.runtime.activations`): float32 multipliers, [M, ceil(H / 128)] or
                [M, 1].

        Returns:
            [M, H] in the dtype of `hidden_states`, bfloat16 where these are quantized; sums are
            float32.

        Raises:
            UnsupportedError: a shape, dtype, device or id that is not as above, no backend that
                runs this, a first call within the capture of a CUDA graph, or torch.export.
        """
        with torch.no_grad():
            if torch.compiler.is_compiling():
                output: Tensor = experts_op.fused_experts(
                    hidden_states,
                    topk_ids,
                    topk_weights,
                    expert_map,
                    apply_router_weight_on_input,
                    activations,
                    self._handle,
                    hidden_scale,
                )
                return output
            return self.run(
                hidden_states,
                topk_ids,
                topk_weights,
                expert_map,
                apply_router_weight_on_input,
                activations,
                hidden_scale,
            )

    def chosen_backend(self) -> str:
        """Name of the backend that runs the experts where they are now.

        Raises:
            UnsupportedError: there is none.
        """
        return self._select(self.activations)[1].name

    def packed_weights(self) -> object:
        """The weights as the backend's kernels read them; None where it takes them as they are.

        Raises:
            UnsupportedError: no backend runs the experts where they are now.
        """
        return self._prepared(self.activations).packed

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """Names the compiled kernels that a call of [tokens, topk] slots runs; None for none.

        Raises:
            UnsupportedError: no backend runs the experts where they are now.
        """
        ready = self._prepared(self.activations)
        if not isinstance(ready.backend, FusedBackend):
            return None
        part = -(-tokens // parts_of(tokens, self.max_tokens))
        return ready.backend.kernels_for(ready.packed, part, topk)

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """Bytes of scratch memory that a call of [tokens, topk] slots takes.

        Of one stream, all layers share the largest. Backends that are not fused take what they need
        from torch's allocator, and say 0.

        Raises:
            UnsupportedError: no backend runs the experts where they are now.
        """
        ready = self._prepared(self.activations)
        if not isinstance(ready.backend, FusedBackend):
            return 0
        part = -(-tokens // parts_of(tokens, self.max_tokens))
        return ready.backend.workspace_bytes(ready.packed, part, topk)

    def run(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        activations: str | None,
        hidden_scale: Tensor | None = None,
    ) -> Tensor:
        """`forward` itself, not as an operator of a graph."""
        ready = self._prepared(self.activations if activations is None else activations)
        check_inputs(
            hidden_states,
            topk_ids,
            topk_weights,
            hidden=ready.weights.hidden,
            device=ready.weights.device,
            weight_on_input=apply_router_weight_on_input,
            hidden_scale=hidden_scale,
            scheme=ready.scheme,
        )
        if hidden_scale is not None:
            check_takes_quantized(ready.backend)
        call = Call(
            backend=ready.backend,
            weights=ready.weights,
            packed=ready.packed,
            scheme=ready.scheme,
            expert_map=self._expert_map(ready, expert_map),
            weight_on_input=apply_router_weight_on_input,
        )
        inputs: tuple[Tensor, ...] = (hidden_states, topk_ids, topk_weights)
        if hidden_scale is not None:
            inputs = (*inputs, hidden_scale)
        if not torch.is_autocast_enabled(hidden_states.device.type):
            return run_in_parts(call, inputs, self.max_tokens)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return run_in_parts(call, inputs, self.max_tokens)

    def extra_repr(self) -> str:
        """Format, sizes and choices, for `print`."""
        w = self._weights
        return (
            f"{w.format}, experts={w.experts}, hidden={w.hidden}, intermediate={w.intermediate}, "
            f"backend={self.backend}, activations={self.activations}"
        )

    def _buffer(self, name: str) -> Tensor:
        # Not get_buffer: of an AttributeError in a property, nn.Module says that there is none.
        tensor = self._buffers.get(name)
        if tensor is None:
            raise UnsupportedError(
                f"{name} of these experts is no buffer any more; assign a tensor to it, or load "
                "the experts again"
            )
        return tensor

    def _select(self, activations: str) -> tuple[Workload, Backend]:
        workload = _workload(self.weights, activations)
        return workload, select(workload, self.backend)

    def _prepared(self, activations: str) -> _Ready:
        """What a call needs and no call changes, made anew where anything of it did."""
        ready = self._ready
        if ready is None or not ready.fits(self._buffers, activations, self.backend):
            ready = self._ready = self._prepare(activations)
        return ready

    def _prepare(self, activations: str) -> _Ready:
        workload, backend = self._select(activations)
        if not capturing(workload.device):
            check_input_scales(self._weights.input_scales())
        packed = None
        if isinstance(backend, FusedBackend):
            if capturing(workload.device):
                raise UnsupportedError(
                    f"backend {backend.name!r} lays out the weights in its first call, which a "
                    "CUDA graph cannot capture; call the experts once before the capture"
                )
            self._ready = None  # lets go of the layout of before
            given = self.weights
            packed = make_kept(lambda: backend.pack(given, workload.activations), workload.device)
            self._adopt(backend.adopted(packed))
        weights = self.weights
        return _Ready(
            asked=(activations, self.backend),
            parts=tuple(
                (name, tensor, None if tensor.is_inference() else tensor._version)
                for name, tensor in weights.tensors().items()
            ),
            weights=weights,
            backend=backend,
            scheme=workload.activations,
            packed=packed,
        )

    def _adopt(self, weights: ExpertWeights | None) -> None:
        """Make views into what a backend laid out the buffers, so that no weight is there twice."""
        if weights is not None:
            for name, tensor in weights.tensors().items():
                self._buffers[name] = tensor
            self._weights = weights

    def _expert_map(self, ready: _Ready, expert_map: Tensor | None) -> Tensor | None:
        if expert_map is None:
            return self.expert_map
        reads = not isinstance(ready.backend, FusedBackend)
        self._check_map(expert_map, values=reads and not capturing(ready.weights.device))
        return expert_map

    def _check_map(self, expert_map: Tensor, *, values: bool) -> None:
        weights = self.weights
        check_expert_map(expert_map, experts=weights.experts, device=weights.device, values=values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = experts_op.handle_of(self)  # a copy is a module of its own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedExperts:
        # float8 codes count as floating point: a cast of the model would rewrite them in silence.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        _ = self.weights  # lets go of the tensors left behind
        self._ready = None
        return self


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What was chosen and made for the experts as they are.

    Attributes:
        asked: activations and backend that were asked for.
        parts: name, tensor and count of writes of each buffer; inference tensors count none.
        weights: of these buffers.
        backend: what runs them.
        scheme: how it quantizes activations.
        packed: what a FusedBackend made of the weights.
    """

    asked: tuple[str, str | None]
    parts: tuple[tuple[str, Tensor, int | None], ...]
    weights: ExpertWeights
    backend: Backend
    scheme: str
    packed: object

    def fits(
        self, buffers: Mapping[str, Tensor | None], activations: str, backend: str | None
    ) -> bool:
        """Whether nothing of it has changed: a write, as load_state_dict does, or a new buffer."""
        return self.asked == (activations, backend) and all(
            buffers.get(name) is tensor and (version is None or tensor._version == version)
            for name, tensor, version in self.parts
        )


def _workload(weights: ExpertWeights, activations: str) -> Workload:
    if activations not in ("format", "none"):
        raise UnsupportedError(f'activations is {activations!r}, but it is "format" or "none"')
    scheme = weights.activations if activations == "format" else "none"
    return Workload(
        format=weights.format,
        activations=scheme,
        experts=weights.experts,
        hidden=weights.hidden,
        intermediate=weights.intermediate,
        device=weights.device,
        act_fn=weights.act_fn,
        bias=bool(weights.biases()),
    )
