"""Decode with a static cache, and on a CUDA device replay each step as one CUDA graph.

`generate` of transformers stays the loop: it samples, pads, stops and builds masks. A forward pass
over few tokens is launched kernel by kernel, which takes the host longer than the device; here it
is captured once and replayed. transformers offers that place to torch.compile, by the method
`get_compiled_call` of a model, which is replaced.

Decisions, each with the failure it prevents:

* Sliding-window layers keep all tokens, and the mask alone is a window. transformers' own static
  layer of such a kind branches on a count of the host and copies an index from the host in each
  step, neither of which a graph can replay.
* The first step over a cache runs without a graph. It compiles kernels and lets libraries
  initialize, which cannot be captured; `FusedExperts` refuses a first call within a capture.
* A step that changes anything of the cache on the host is refused. Each replay would otherwise
  repeat the state of the capture.
* Every call returns copies of the graph's outputs. `generate` may collect them over steps, and the
  next replay overwrites the originals.
* A graph lives as long as its cache. Otherwise each call of `generate` would leak one.
* Graphs do not hold the experts that they read. Otherwise weights that were moved off a device
  would stay there as long as a cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from moequant.arguments import check_count
from moequant.compatibility.kv_cache import kv_cache
from moequant.device import free_bytes
from moequant.errors import MoequantError, UnsupportedError
from moequant.integrations.transformers_library import import_transformers
from moequant.runtime import FusedExperts
from moequant.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

    from transformers import Cache, PreTrainedModel

    from moequant.runtime.backends import PackedExperts

Decoding = Literal["torch_compile", "cuda_graphs", "static_cache", "dynamic_cache"]
"""How a model decodes over a static cache: by torch.compile, in graphs, or by neither; or without
one."""

_EAGER = (
    "load the model with enforce_eager=True, in `moequant generate` --enforce-eager, to decode "
    "without CUDA graphs"
)
_CACHES = ("cache", "past_key_values")
"""What transformers calls a cache among arguments and outputs, from 5.24 on, and before."""


@functools.cache
def cache_argument() -> str:
    """What the installed transformers calls the cache that `generate` is given."""
    method = import_transformers().GenerationMixin.prepare_inputs_for_generation
    new, old = _CACHES
    return new if new in signature(method).parameters else old


def why_not_static(model: PreTrainedModel) -> str | None:
    """Why no static cache holds the states of this model's layers; None if one does."""
    if not model._supports_default_dynamic_cache():
        return f"{type(model).__name__} has a cache of its own class"
    config = model.config.get_text_config(decoder=True)
    try:
        cache = import_transformers().StaticCache(config, max_cache_len=1)
    except KeyError as error:
        return f"transformers has no static cache for layers of type {error}"
    for layer in cache.layers:
        if not layer.is_compileable:
            return f"{type(layer).__name__}, a layer's cache, is not static"
    return None


def static_cache(model: PreTrainedModel, max_tokens: int, *, sequences: int = 1) -> Cache:
    """An empty cache for `max_tokens` tokens of each sequence, allocated by the first call.

    It takes the memory of `max_tokens` tokens in every layer, also in those with a sliding window.
    To use it again, call its method `reset`; graphs over it are then used again, too.

    Args:
        model: what it is for.
        max_tokens: of a prompt and its answer.
        sequences: how many the first call has at least; only its memory is checked for them.

    Raises:
        UnsupportedError: no static cache holds the states of this model's layers, or `max_tokens`
            is less than 1.
        MoequantError: the keys and values of so many tokens take more memory than the device has
            free. Of a model whose keys and values are not known, that is not checked.
    """
    _check_static(model)
    check_count("max_tokens", max_tokens, 1)
    _check_memory(model, sequences * max_tokens)
    from transformers import cache_utils

    config = model.config.get_text_config(decoder=True)
    cache = cache_utils.StaticCache(config, max_cache_len=max_tokens)
    for index, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.StaticSlidingWindowLayer:
            cache.layers[index] = cache_utils.StaticLayer(max_cache_len=max_tokens)
    return cache


def _check_static(model: PreTrainedModel) -> None:
    reason = why_not_static(model)
    if reason is not None:
        raise UnsupportedError(f"{type(model).__name__} has no static cache: {reason}; {_EAGER}")


def _check_memory(model: PreTrainedModel, tokens: int) -> None:
    """Refuse a cache that the device cannot hold, by the least that it takes, if that is known."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    kv, free = kv_cache(model.config.to_dict(), layers, tp=1), free_bytes(model.device)
    if kv is None or free is None:
        return
    needed = tokens * (kv.token_bytes + kv.window_token_bytes)
    if needed > free:
        raise MoequantError(
            f"a static cache of {tokens} tokens takes {size(needed)}, but {model.device} has "
            f"{size(free)} free; ask for fewer tokens (--max-new-tokens), or free memory"
        )


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
    _check_static(model)
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
        self._read: _GraphInputs | None = None

    def compiled_call(self, compile_config: object) -> Callable[..., Any]:
        """Instead of `PreTrainedModel.get_compiled_call`: one call of `generate` calls it once."""
        model = self._get_model()
        if compile_config is not None:
            call: Callable[..., Any] = type(model).get_compiled_call(model, compile_config)
            return call
        read = _GraphInputs(model)
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
        cache = inputs[_name_of_cache(inputs)]
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
        state = _host_state(cache)
        if self._state != state:
            self._captured.clear()
            self._state = state

    def run(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
        """Run a step: the first of its kind without a graph, the others as a graph."""
        kind = _kind_of(inputs)
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
        for place, tensor in _tensors_of(inputs).items():
            self.inputs[place].copy_(tensor)
        self.replay_graph()
        copies = {name: _map_tensors(value, Tensor.clone) for name, value in self.outputs.items()}
        cache = inputs[_name_of_cache(inputs)]
        return self.output_class(**copies, **{self.cache_field: cache})


def _name_of_cache(named: Collection[str]) -> str:
    """Which of some arguments, or fields of an output, is the cache."""
    return next(name for name in _CACHES if name in named)


def _capture(model: PreTrainedModel, inputs: Mapping[str, Any]) -> _Captured:
    """Capture the forward pass over `inputs`, without running it.

    Raises:
        UnsupportedError: it waits for the device, or changes the cache on the host.
    """
    check_capturable(model)
    static = {
        name: value if name in _CACHES else _map_tensors(value, Tensor.clone)
        for name, value in inputs.items()
    }
    cache = inputs[_name_of_cache(inputs)]
    before = _host_state(cache)
    try:
        replay_graph, output = capture_graph(lambda: model(**static), model.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(
            f"{type(model).__name__}: a decoding step cannot be captured in a CUDA graph "
            f"({str(error).splitlines()[0]}); {_EAGER}"
        ) from error
    for layer, old, new in zip(cache.layers, before, _host_state(cache), strict=True):
        changed = [name for name in new if old.get(name) != new[name]]
        if changed:
            raise UnsupportedError(
                f"{type(layer).__name__}, the cache of a layer, changes {', '.join(changed)} on "
                "the host in a decoding step, which no CUDA graph repeats; give `generate` no "
                f"{cache_argument()}, or a cache of moequant.integrations.decoding.static_cache, "
                f"or {_EAGER}"
            )
    return _Captured(
        replay_graph=replay_graph,
        inputs=_tensors_of(static),
        output_class=type(output),
        cache_field=_name_of_cache(output),
        # The cache is the key of its graphs, which must not hold it.
        outputs={name: value for name, value in output.items() if name not in _CACHES},
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
                f"no CUDA graph captures; choose another backend, or {_EAGER}"
            )


class _GraphInputs:
    """What graphs of a model read: its weights where they are, and its experts as they are run.

    Of the experts, what their backend made and how many tokens they run at once. Other choices and
    writes to them make their backend make it anew, which frees what it computed from the old ones.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._packed: list[ref[PackedExperts]] = []
        self._max_tokens: list[int] = []
        self._addresses: list[int] = []
        for module in model.modules():
            if isinstance(module, FusedExperts):
                # Before addresses, because it may replace buffers.
                self._packed.append(ref(module.packed()))
                self._max_tokens.append(module.max_tokens)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._addresses.append(tensor.data_ptr())

    def is_as_before(self, before: _GraphInputs) -> bool:
        """Whether graphs that were captured over `before` still hold; this was read just now."""
        return (
            self._addresses == before._addresses
            and self._max_tokens == before._max_tokens
            and all(map(_same_object, self._packed, before._packed))
        )


def _same_object(new: ref[PackedExperts], old: ref[PackedExperts]) -> bool:
    """Whether both refer to one object, which is there."""
    packed = new()
    return packed is not None and packed is old()


def _kind_of(value: Any, name: str = "inputs") -> Hashable:
    """Equal for inputs that one graph can run: shapes and dtypes of tensors, and other values.

    Raises:
        UnsupportedError: an argument that can be neither copied into a graph nor compared.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if name in _CACHES:
        return None
    if isinstance(value, dict):
        return tuple((key, _kind_of(value[key], key)) for key in sorted(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedError(
        f"a decoding step has the argument {name} of type {type(value).__name__}, which no CUDA "
        f"graph repeats; leave it out, or {_EAGER}"
    )


def _tensors_of(inputs: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors among arguments, and in dicts of them, by place."""
    found: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        elif isinstance(value, dict):
            found |= _tensors_of(value, f"{prefix}{name}.")
    return found


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor in its dicts, lists and tuples changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(part, change) for part in value)
    return value


def _host_state(cache: Cache) -> list[dict[str, Hashable]]:
    """What the host knows of each layer's cache: values, and where tensors are."""
    return [{name: _fact(value) for name, value in vars(layer).items()} for layer in cache.layers]


def _fact(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.data_ptr(), tuple(value.shape)
    if isinstance(value, dict):
        return tuple((key, _fact(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_fact, value))
    return value if isinstance(value, (bool, int, float, str)) else id(value)
