"""FusedExperts: the routed experts of a layer as a module."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moequant.arguments import check_count
from moequant.errors import UnsupportedError
from moequant.runtime import experts_op
from moequant.runtime.backends import PackedExperts
from moequant.runtime.call import MAX_TOKENS, count_parts, part_sizes, run_experts
from moequant.runtime.capture import capturing
from moequant.runtime.inputs import check_expert_map, check_input_scales, check_out
from moequant.runtime.kept_memory import make_kept
from moequant.runtime.packing import check_activations, pack_experts, scheme_of
from moequant.runtime.select import select
from moequant.runtime.untraced import untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.backends import Backend, Workload
    from moequant.runtime.weights import ExpertWeights


class FusedExperts(nn.Module):
    """The routed experts of one layer: prepare, a backend, finalize.

    For every token, the sum over its experts t of
    `topk_weights[t] * down(act_fn(gate(x), up(x)))` of expert `topk_ids[t]`.

    Inference only: a call has no gradient. If a backward pass reaches it, that raises
    UnsupportedError; nothing is saved for that, and autocast is off inside.

    Weights: they are packed for the backend here, on their device, and are buffers under the names
    of its layout: `w13_qdata`, `w2_scale` and so on. So they are part of `state_dict`, which can be
    saved with safetensors, and move between devices as any module's do, but keep their dtypes:
    `.half()` on a model around this module leaves codes and scales alone. Moved to a device whose
    backend reads another layout, or given another `backend`, the next call packs them again.

    Streams and threads: a call runs on the current stream of the device. Calls on several streams
    or from several threads do not disturb each other, since each pair of a thread and a stream has
    a workspace of its own. After a call that needed a larger one, the smaller one is freed once
    every layer that used it has been called again. The first call after weights were replaced must
    not run in two threads at once on a GPU.

    CUDA graphs: call once with the same sizes and dtypes before the capture, which compiles
    kernels; capture again after weights have changed or moved. Within a capture a call takes its
    workspace from the graph's memory. `moequant warm-up` compiles ahead.

    Under torch.compile a call is one operator, moequant::fused_experts, that the graph keeps whole.
    It names the module by a number, so code compiled for one layer is compiled again for the
    next, up to torch's recompile_limit: compile the whole model, or set
    torch._dynamo.config.allow_unspec_int_on_nn_module. The result is copied to `out`, which may
    then be memory of another argument, and `workspace` is not used; with fullgraph=True torch
    raises an error of its own for an `out` that is wrong, and quotes ours. torch.export is refused:
    what it saved would hold the number, and not the experts.

    Args:
        weights: the experts here; or what `pack_experts` made of them.
        backend: name of a backend; by default the best that runs them on their device.
        activations: "format" quantizes activations as the format's GEMM does, before either
            GEMM; "none" never does; "fp8_token" to FP8 with a scale per token, which is faster for
            mxfp4 on SM90; "fp8_tensor" to FP8 with one scale for all tokens, computed, so that
            their results depend on each other; "nvfp4", "mxfp4" and "mxfp8" to these, as kernels
            for SM100 do; elsewhere `torch_reference` emulates them.
        expert_map: [global experts] int32 or int64, where the router's ids are not the indices of
            `weights`: index of each id, or -1 for an expert that is not here and contributes
            nothing. Not part of `state_dict`.
        max_tokens: more tokens than that, or than have 65,536 token-expert pairs, run in parts, as
            equal as can be, one after the other; so memory is bounded whatever M is. A part gives
            the bits of a call of its tokens, whose number decides in which order backends add. With
            "fp8_tensor" each part has scales of its own.

    Raises:
        UnsupportedError: no backend runs this, or the named one does not; says why. Or an
            `expert_map`, `activations` or `max_tokens` that is not as above.
        CheckpointError: static scales of activations that no scheme can use.
    """

    def __init__(
        self,
        weights: ExpertWeights | PackedExperts,
        *,
        backend: str | None = None,
        activations: ActivationsChoice = "format",
        expert_map: Tensor | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        super().__init__()
        packed = weights
        if not isinstance(packed, PackedExperts):
            packed = pack_experts(packed, backend=backend, activations=activations)
        for name, tensor in packed.tensors.items():
            self.register_buffer(name, tensor)
        self._names = tuple(packed.tensors)
        self._layout = packed.layout
        self._workload = packed.workload
        if packed is weights:
            # What was packed with other choices; else `pack_experts` has made these.
            check_activations(activations)
            device = packed.workload.device
            select(self._workload_for(activations, packed.tensors, device), backend)
        self._ready: dict[str, _Ready] = {}
        self._handle = experts_op.handle_of(self)
        self.backend = backend
        self.activations = activations
        self.max_tokens = max_tokens
        self.register_buffer("_expert_map", None, persistent=False)
        self.expert_map = expert_map

    @property
    def max_tokens(self) -> int:
        """See the constructor; checked when it is assigned."""
        return self._max_tokens

    @max_tokens.setter
    def max_tokens(self, value: int) -> None:
        self._max_tokens = check_count("max_tokens", value, 1)

    @property
    def expert_map(self) -> Tensor | None:
        """See the constructor; checked when it is assigned, on the host unless within a capture."""
        return self._buffers["_expert_map"]

    @expert_map.setter
    def expert_map(self, value: Tensor | None) -> None:
        if value is not None:
            self._check_map(value, values=not capturing(self._buffer(self._names[0]).device))
        self._buffers["_expert_map"] = value

    @property
    def weights(self) -> ExpertWeights:
        """Gate, up and down where they are now: views of the buffers, or copies if permuted.

        Raises:
            CheckpointError: a buffer was replaced by one of another dtype or shape.
        """
        return self._layout.unpack(self._tensors(), self._workload)

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        expert_map: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activations: ActivationsChoice | None = None,
        hidden_scale: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Run the experts on the current stream; see the class about threads and CUDA graphs.

        Args:
            hidden_states: [M, H] bfloat16, float16 or float32; or float8_e4m3fn, with hidden_scale.
            topk_weights: [M, T] float32, bfloat16 or float16.
            topk_ids: [M, T] int32 or int64; -1 contributes nothing. Backends that read ids on the
                host refuse one out of range; elsewhere, and within the capture of a CUDA graph, it
                contributes nothing.
            expert_map: instead of the module's own; the same holds for indices in it.
            apply_router_weight_on_input: multiply the weight into the input, in float32, and not
                into the result; for T = 1 only.
            activations: instead of the module's own.
            hidden_scale: of hidden states that come quantized, as the weights' format quantizes
                them (`moequant.runtime.activations`): float32 multipliers, [M, ceil(H / 128)] or
                [M, 1].
            out: where to write the result: [M, H] contiguous, of the result's dtype, in memory that
                no other argument has.
            workspace: scratch memory instead of the one that all layers share: uint8, contiguous,
                at least `workspace_bytes`, at a multiple of 16 bytes. It must not be in use by
                another call.

        Returns:
            [M, H] in the dtype of `hidden_states`, bfloat16 where these are quantized; sums are
            float32. It is `out`, where that is given, or a tensor in its memory where an argument
            requires a gradient, so that a backward pass is refused.

        Raises:
            UnsupportedError: a shape, dtype, device or id that is not as above, no backend that
                runs this, a first call within the capture of a CUDA graph, or torch.export.
        """
        arguments = (
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map,
            apply_router_weight_on_input,
            activations,
            hidden_scale,
        )
        if torch.compiler.is_compiling():
            if out is not None:
                check_out(out, hidden_states, hidden_scale)
            output: Tensor = experts_op.fused_experts(self._handle, *arguments)
            if out is not None and output.requires_grad:
                # Not `out` itself, which would keep the graphs of earlier calls.
                return out.detach().copy_(output)
            return output if out is None else out.copy_(output)
        return untraced(self.run)(*arguments, out=out, workspace=workspace)

    def chosen_backend(self) -> str:
        """Name of the backend that runs the experts where they are now.

        Raises:
            UnsupportedError: there is none.
        """
        return self.packed().backend.name

    def packed(self, activations: str | None = None) -> PackedExperts:
        """The experts as their backend runs them, on the module's own buffers.

        Args:
            activations: instead of the module's own.

        Raises:
            UnsupportedError: no backend runs the experts where they are now.
        """
        activations = self.activations if activations is None else activations
        if type(activations) is not str:  # what cannot be looked up is refused, too
            check_activations(activations)
        ready = self._ready.get(activations)
        if ready is None or not ready.fits(self._buffers, self.backend):
            self._release_replaced()
            ready = self._make_ready(activations)
            self._release_replaced()  # of those that it packed anew
            self._ready[activations] = ready
        return ready.packed

    def _release_replaced(self) -> None:
        """Keep no tensors that were buffers once; other threads may add entries meanwhile."""
        for activations, ready in list(self._ready.items()):
            if not ready.fits(self._buffers, self.backend):
                self._ready.pop(activations, None)

    def part_sizes(self, tokens: int, topk: int) -> tuple[int, ...]:
        """The numbers of tokens of the parts that a call of [tokens, topk] pairs runs in.

        Returns:
            One number, or two that differ by 1, the larger first.

        Raises:
            UnsupportedError: `tokens` or `topk` is no whole number, or less than 0.
        """
        tokens, topk = check_count("tokens", tokens), check_count("topk", topk)
        return part_sizes(tokens, count_parts(tokens, topk, self.max_tokens))

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """As `PackedExperts.kernels_for`, for a call that may run in parts.

        Raises:
            UnsupportedError: as `part_sizes`, or no backend runs the experts where they are now.
        """
        packed = self.packed()
        names = [packed.kernels_for(size, int(topk)) for size in self.part_sizes(tokens, topk)]
        if None in names:
            return None
        first, *others = dict.fromkeys(names)
        return (first, *others) if others else first

    def compile_ahead(self, tokens: Iterable[int], topk: int) -> None:
        """Compile kernels of calls of these tokens, as far as the backend compiles several at once.

        Calls compile what is left.

        Args:
            tokens: each M; best one for each set of kernels, see `kernels_for`.
            topk: T.

        Raises:
            UnsupportedError: as `kernels_for`.
            MoequantError: the compiler refuses a kernel.
        """
        topk = check_count("topk", topk)
        sizes = [size for M in tokens for size in self.part_sizes(M, topk)]
        self.packed().compile_ahead(list(dict.fromkeys(sizes)), topk)

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """Bytes of scratch memory that a call of [tokens, topk] token-expert pairs needs.

        All layers share one workspace for each thread and stream. Backends that are not fused take
        what they need from torch's allocator, and say 0.

        Raises:
            UnsupportedError: as `kernels_for`.
        """
        packed, sizes = self.packed(), self.part_sizes(tokens, topk)
        return max(packed.workspace_bytes(size, int(topk)) for size in sizes)

    def run(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        activations: str | None,
        hidden_scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """`forward` itself, not as an operator of a graph."""
        packed = self.packed(activations)
        if expert_map is None:
            expert_map = self._buffers["_expert_map"]
        else:
            reads = packed.waits_for_device and not capturing(packed.workload.device)
            self._check_map(expert_map, values=reads)
        return run_experts(
            packed,
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            weight_on_input=apply_router_weight_on_input,
            hidden_scale=hidden_scale,
            out=out,
            workspace=workspace,
            max_tokens=self._max_tokens,
        )

    def extra_repr(self) -> str:
        """Format, sizes and choices, for `print`."""
        w = self._workload
        scheme: str = self.activations
        with suppress(UnsupportedError):  # not one of those there are, which the next call refuses
            scheme = scheme_of(w.format, scheme, static="w13_input_scale" in self._names)
        return (
            f"{w.format}, experts={w.experts}, hidden={w.hidden}, intermediate={w.intermediate}, "
            f"backend={self.backend}, activations={scheme}, layout={self._layout.name}"
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

    def _tensors(self) -> dict[str, Tensor]:
        return {name: self._buffer(name) for name in self._names}

    def _make_ready(self, activations: str) -> _Ready:
        """Choose a backend for the experts where they are now, and pack them again if necessary."""
        tensors = self._tensors()
        device = tensors[self._names[0]].device
        own = select(self._workload_for(self.activations, tensors, device), self.backend)
        if self._layout not in own.layouts:
            tensors = self._relayout(own, tensors)
        backend = own
        if activations != self.activations:
            backend = select(self._workload_for(activations, tensors, device), self.backend)
            if self._layout not in backend.layouts:
                read = " or ".join(map(str, backend.layouts))
                raise UnsupportedError(
                    f"a call with activations={activations!r} runs on backend {backend.name!r}, "
                    f"which reads weights as {read}, but these are packed as "
                    f"{self._layout}; give activations={activations!r} to FusedExperts, which "
                    "packs for all its calls"
                )
        if "w13_input_scale" in tensors and not capturing(device):
            check_input_scales(self.weights.input_scales(), self._workload.format)
        workload = self._workload_for(activations, tensors, device)
        packed = make_kept(lambda: backend.load(tensors, workload), device)
        if capturing(device) and packed.compiles:
            raise UnsupportedError(
                f"backend {backend.name!r} compiles kernels in its first call, which a CUDA graph "
                "cannot capture; call the experts once before the capture"
            )
        return _Ready(
            asked=self.backend,
            buffers=tuple(
                (name, tensor, None if tensor.is_inference() else tensor._version)
                for name, tensor in tensors.items()
            ),
            packed=packed,
        )

    def _workload_for(
        self, activations: str, tensors: Mapping[str, Tensor], device: torch.device
    ) -> Workload:
        scheme = scheme_of(self._workload.format, activations, static="w13_input_scale" in tensors)
        return replace(self._workload, activations=scheme, device=device)

    def _relayout(self, backend: Backend, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pack the weights for `backend`, and make the result the buffers."""
        device = next(iter(tensors.values())).device

        def pack() -> dict[str, Tensor]:
            return backend.pack(self._layout.unpack(tensors, self._workload))

        packed = make_kept(pack, device)
        for name in self._names:
            del self._buffers[name]
        self._buffers.update(packed)
        self._names, self._layout = tuple(packed), backend.layout_of(packed)
        return packed

    def _check_map(self, expert_map: Tensor, *, values: bool) -> None:
        device = self._buffer(self._names[0]).device
        check_expert_map(expert_map, experts=self._workload.experts, device=device, values=values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = experts_op.handle_of(self)  # a copy is a module of its own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedExperts:
        # float8 codes count as floating point: a cast of the model would rewrite them in silence.
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        self._release_replaced()
        return self


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """Packed experts, and what they were made of.

    Attributes:
        asked: the backend that was asked for.
        buffers: name, tensor and count of writes of each buffer; inference tensors count none.
        packed: the experts.
    """

    asked: str | None
    buffers: tuple[tuple[str, Tensor, int | None], ...]
    packed: PackedExperts

    def fits(self, buffers: Mapping[str, Tensor | None], backend: str | None) -> bool:
        """Whether nothing has changed: a write, as load_state_dict does, or a new buffer."""
        if self.asked != backend:
            return False
        for name, tensor, version in self.buffers:
            if buffers.get(name) is not tensor:
                return False
            if version is not None and tensor._version != version:
                return False
        return True
