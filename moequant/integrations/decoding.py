"""Decode with a static cache, and on a CUDA device replay each step as one CUDA graph.

`generate` of transformers stays the loop: it samples, pads, stops and builds masks. A forward pass
over few tokens is launched kernel by kernel, which takes the host longer than the device; here it
is captured once and replayed. transformers offers that place to torch.compile, by the method
`get_compiled_call` of a model, which is replaced.

Decisions, each with the failure it prevents:

* The first step over a cache runs without a graph. It compiles kernels and lets libraries
  initialize, which cannot be captured; `FusedExperts` refuses a first call within a capture.
* A step that changes anything of the cache on the host is refused. Each replay would otherwise
  repeat the state of the capture.
* Every call returns copies of the graph's outputs. `generate` may collect them over steps, and the
  next replay overwrites the originals.
* A graph lives as long as its cache. Otherwise each call of `generate` would leak one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.integrations.graph_inputs import (
    GraphWeights,
    host_state,
    kind_of,
    map_tensors,
    tensors_of,
)
from moequant.integrations.static_cache import (
    CACHE_NAMES,
    DECODE_EAGERLY,
    cache_argument,
    check_static,
    name_of_cache,
    static_cache,
)
from moequant.runtime import FusedExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from transformers import Cache, PreTrainedModel

Decoding = Literal["torch_compile", "cuda_graphs", "static_cache", "dynamic_cache"]
"""How a model decodes over a static cache: by torch.compile, in graphs, or by neither; or without
one."""


def use_static_cache(model: PreTrainedModel) -> None:
    """Make `model.generate` use a static cache, and on a CUDA device also CUDA graphs.

    `generate` then allocates the cache for as many tokens as it may return, unless it is given one
    as `cache`, before transformers 5.24 `past_key_values`, with `cache_implementation=None`. Its
    `disable_compile=True` decodes without graphs, and `compile_config` by torch.compile instead.
    Where weights were moved or replaced before a call, or experts were written to or given other
    choices, graphs are captured again.

    Args:
        model: a model on one device.

    Raises:
        UnsupportedError: no static cache holds the states of this model's layers.
    """
    check_static(model)
    decoder = Decoder(model)
    model.get_compiled_call = decoder.compiled_call
    model._prepare_static_cache = decoder.prepare_static_cache
    model.generation_config.cache_implementation = "static"


def decoding_of(model: PreTrainedModel) -> Decoding:
    """How `generate` of this model decodes where it is now."""
    if decoder_of(model) is None:
        return "dynamic_cache"
    return "cuda_graphs" if model.device.type == "cuda" else "static_cache"


def decoder_of(model: PreTrainedModel) -> Decoder | None:
    """What `use_static_cache` gave the model; None if it was not called."""
    decoder = getattr(model.get_compiled_call, "__self__", None)
    return decoder if isinstance(decoder, Decoder) else None


class Decoder:
    """The graphs of one model, by cache, and what `generate` calls to get at them."""

    def __init__(self, model: PreTrainedModel) -> None:
        # The model holds this; a cycle would keep its weights until the garbage collector runs.
        self._model = ref(model)
        self._steps: WeakKeyDictionary[Cache, _Steps] = WeakKeyDictionary()
        self._read: GraphWeights | None = None

    def compiled_call(self, compile_config: object) -> Callable[..., Any]:
        """Instead of `PreTrainedModel.get_compiled_call`: one call of `generate` calls it once."""
        model = self._get_model()
        if compile_config is not None:
            call: Callable[..., Any] = type(model).get_compiled_call(model, compile_config)
            return call
        read = GraphWeights(model)
        if self._read is None or not read.is_as_before(self._read):
            self._steps.clear()
            self._read = read
        return _Call(model, self._steps)

    def prepare_static_cache(
        self,
        cache_implementation: str,
        batch_size: int,
        max_cache_len: int,
        prefill_chunk_size: int | None,
        model_kwargs: Mapping[str, Any],
    ) -> Cache:
        """Instead of the method of transformers' GenerationMixin that begins with an underscore."""
        model = self._get_model()
        if cache_implementation == "static" and prefill_chunk_size is None:
            return static_cache(model, max_cache_len, sequences=batch_size)
        cache: Cache = type(model)._prepare_static_cache(
            model, cache_implementation, batch_size, max_cache_len, prefill_chunk_size, model_kwargs
        )
        return cache

    def _get_model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "the model holds this object, and calls it"
        return model

    # A copy of the model copies this, too: without graphs, which hold the original's addresses.
    def __getstate__(self) -> PreTrainedModel:
        return self._get_model()

    def __setstate__(self, model: PreTrainedModel) -> None:
        self.__init__(model)  # type: ignore[misc]


class _Call:
    """The forward pass of a model during one call of `generate`, over one cache."""

    def __init__(self, model: PreTrainedModel, steps: WeakKeyDictionary[Cache, _Steps]) -> None:
        self._model = model
        self._steps = steps
        self._tokens: int | None = None

    def __call__(self, **inputs: Any) -> Any:
        """As the model's own call; raises UnsupportedError where the cache is full."""
        cache = inputs[name_of_cache(inputs)]
        steps = self._steps.setdefault(cache, _Steps())
        if self._tokens is None:
            self._tokens = int(cache.get_seq_length())
            steps.drop_stale(cache)
        self._take_room(cache, inputs)
        return steps.run(self._model, inputs)

    def _take_room(self, cache: Cache, inputs: Mapping[str, Any]) -> None:
        """Count tokens on the host: writing beyond a cache would be an error of the device."""
        assert self._tokens is not None
        ids = inputs.get("input_ids")
        self._tokens += (inputs["inputs_embeds"] if ids is None else ids).shape[1]
        room = cache.get_max_length()  # -1 for none
        if self._tokens > room > 0:
            raise UnsupportedError(
                f"the static cache has room for {room} tokens, but there are {self._tokens}; "
                "give `static_cache` the tokens of the prompt and of the answer together"
            )


class _Steps:
    """The graphs over one cache, one for each kind of inputs."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, _Captured | None] = {}
        self._state: list[dict[str, Hashable]] | None = None

    def drop_stale(self, cache: Cache) -> None:
        """Forget graphs over other memory than the cache has now, as after a beam search."""
        state = host_state(cache)
        if self._state != state:
            self._captured.clear()
            self._state = state

    def run(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
        """Run a step: the first of its kind without a graph, the others as a graph."""
        kind = kind_of(inputs)
        if kind not in self._captured:
            self._captured[kind] = None
            return model(**inputs)
        captured = self._captured[kind]
        if captured is None:
            captured = self._captured[kind] = _capture(model, inputs)
        return captured.replay(inputs)


@dataclass(frozen=True, kw_only=True)
class _Captured:
    """A forward pass in a graph.

    Attributes:
        replay_graph: runs it.
        inputs: its inputs that are tensors, by place; copied to before each replay.
        output_class: a class of transformers' ModelOutput.
        cache_field: its field for the cache.
        outputs: its fields but the cache, with the memory that the graph writes.
    """

    replay_graph: Callable[[], None]
    inputs: dict[str, Tensor]
    output_class: Callable[..., Any]
    cache_field: str
    outputs: dict[str, Any]

    def replay(self, inputs: Mapping[str, Any]) -> Any:
        """The output for `inputs`."""
        for place, tensor in tensors_of(inputs).items():
            self.inputs[place].copy_(tensor)
        self.replay_graph()
        copies = {name: map_tensors(value, Tensor.clone) for name, value in self.outputs.items()}
        cache = inputs[name_of_cache(inputs)]
        return self.output_class(**copies, **{self.cache_field: cache})


def _capture(model: PreTrainedModel, inputs: Mapping[str, Any]) -> _Captured:
    """Capture the forward pass over `inputs`, without running it.

    Raises:
        UnsupportedError: it waits for the device, or changes the cache on the host.
    """
    check_capturable(model)
    static = {
        name: value if name in CACHE_NAMES else map_tensors(value, Tensor.clone)
        for name, value in inputs.items()
    }
    cache = inputs[name_of_cache(inputs)]
    before = host_state(cache)
    try:
        replay_graph, output = capture_graph(lambda: model(**static), model.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(
            f"{type(model).__name__}: a decoding step cannot be captured in a CUDA graph "
            f"({str(error).splitlines()[0]}); {DECODE_EAGERLY}"
        ) from error
    for layer, old, new in zip(cache.layers, before, host_state(cache), strict=True):
        changed = [name for name in new if old.get(name) != new[name]]
        if changed:
            raise UnsupportedError(
                f"{type(layer).__name__}, the cache of a layer, changes {', '.join(changed)} on "
                "the host in a decoding step, which no CUDA graph repeats; give `generate` no "
                f"{cache_argument()}, or one of moequant.integrations.static_cache.static_cache, "
                f"or {DECODE_EAGERLY}"
            )
    return _Captured(
        replay_graph=replay_graph,
        inputs=tensors_of(static),
        output_class=type(output),
        cache_field=name_of_cache(output),
        # The cache is the key of its graphs, which must not hold it.
        outputs={name: value for name, value in output.items() if name not in CACHE_NAMES},
    )


def capture_graph(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """A replay of what `run` launches on a CUDA device, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: another may use the device meanwhile.
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = run()
    return graph.replay, output


def check_capturable(model: PreTrainedModel) -> None:
    """Check that CUDA graphs can capture the experts.

    Raises:
        UnsupportedError: their backend waits for the device.
    """
    for module in model.modules():
        if isinstance(module, FusedExperts) and module.packed().waits_for_device:
            raise UnsupportedError(
                f"backend {module.chosen_backend()!r} of the experts waits for the device, which "
                f"no CUDA graph captures; choose another backend, or {DECODE_EAGERLY}"
            )
