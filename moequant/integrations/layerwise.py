"""A transformers model of which one layer at a time is in memory.

The model is built on the meta device, by transformers' own class. `layer` gives one layer its
weights for as long as a `with` statement lasts, and `run` calls it as the model's own forward does:
that forward is run, with the other layers replaced. A layer before the one wanted returns what the
layer before it has returned earlier; then the forward ends. So masks, rotary embeddings, positions
and whatever else a class computes between its layers are that class's.

Decisions, each with the failure it prevents:

* Experts run `eager`, one after the other. Otherwise a kernel would take them all, and nothing
  could see what each multiplies.
* Layers before the previous one return NaN, and a NaN among the arguments of a layer is refused.
  Otherwise a model that passes something from layer to layer besides what the previous one returns
  would compute something else, without an error.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from moequant.errors import UnsupportedError
from moequant.integrations.expert_modules import decoder_module, expert_blocks
from moequant.integrations.module_weights import ModuleWeights, check_complete, size_bytes
from moequant.integrations.stored_tensors import stored_projections, stored_tensors
from moequant.integrations.transformers_library import (
    building,
    check_runs,
    import_transformers,
    model_class,
    read_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from torch import Tensor

    from moequant.integrations.runtime_experts import RuntimeExperts
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.source_model import SourceModel

Activations = torch.Tensor | tuple[torch.Tensor | None, ...]
"""What a layer returns: one tensor, mostly the hidden states [B, S, H], or several."""


class LayerwiseModel:
    """The decoder of a transformers model, one layer in memory at a time.

    Args:
        checkpoint: a source, quantized or not.
        source: what is known of it.
        dtype: to compute in.
        device: to compute on.
        experts: run instead of transformers' own, whose weights are not loaded then.

    Raises:
        CheckpointError: config.json does not describe a model that transformers can build.
        UnsupportedError: transformers is not installed, or has no such model; or `experts` cannot
            replace its own.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: SourceModel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        experts: RuntimeExperts | None = None,
    ) -> None:
        transformers = import_transformers()
        self.source = source
        self._path = checkpoint.path
        self.dtype = dtype
        self.device = device
        config = read_config(transformers, checkpoint.path)
        config._experts_implementation = "eager"
        self._model = _build(transformers, config, dtype)
        self.decoder: Any = decoder_module(self._model)
        self.layers: nn.ModuleList = _layers(self.decoder)
        self._embedding: nn.Module = self._model.get_input_embeddings()
        self._weights = ModuleWeights(
            self._model,
            self.decoder,
            stored_tensors(checkpoint, source, dtype),
            dtype=dtype,
            device=device,
        )
        self._projections = stored_projections(source)
        self._experts = experts
        if experts is not None:
            experts.check(self._model)

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return str(self._model.config.model_type)

    def load_rest(self) -> None:
        """Load what is outside of layers and embedding: norms, rotary embeddings; it stays."""
        self._weights.load(self.decoder, without=(self.layers, self._embedding))

    @contextmanager
    def embedding(self) -> Iterator[None]:
        """Load the embedding for as long as the context lasts."""
        with self._weights.loaded(self._embedding):
            yield

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Load a layer for as long as the context lasts.

        Raises:
            CheckpointError: a tensor is missing, unreadable or of another shape.
        """
        if self._experts is None or index not in self._experts.layers:
            with self._weights.loaded(self.layers[index]) as layer:
                yield layer
            return
        block = cast("Any", expert_blocks(self._model)[index])
        own = block.experts
        with self._weights.loaded(self.layers[index], without=(own,)) as layer:
            block.experts = self._experts.load(index)
            try:
                yield layer
            finally:
                block.experts = own

    @contextmanager
    def head(self) -> Iterator[None]:
        """Load what turns hidden states into logits for as long as the context lasts.

        Raises:
            CheckpointError: as `layer`.
            UnsupportedError: the model has no such module.
        """
        head = self._head
        if not self._head_is_tied:
            with self._weights.loaded(head):
                yield
            return
        with self._weights.loaded(self._embedding):
            head.weight = cast("nn.Parameter", self._embedding.weight)
            check_complete(self._weights.prefix(head), head)
            try:
                yield
            finally:
                head.to("meta")  # with a weight of its own, as before

    def embed(self, ids: Tensor) -> Tensor:
        """The embedding of token ids [B, S], within `embedding`: [B, S, H]."""
        with torch.inference_mode():
            return cast("Tensor", self._embedding(ids.to(self.device)))

    def run(
        self, index: int, ids: Tensor, embedded: Tensor, before: Activations | None
    ) -> Activations:
        """What a layer returns, within `layer`.

        Args:
            index: of the layer.
            ids: token ids [B, S], without padding.
            embedded: what `embed` returned for them.
            before: what the layer before returned; None for the first.

        Raises:
            UnsupportedError: the layer takes, or returns, what cannot be kept between layers.
        """
        assert (before is None) == (index == 0), index

        def wanted(*args: object, **kwargs: object) -> NoReturn:
            self._check_arguments(index, args, kwargs)
            raise _Done(type(self.layers[index]).forward(self.layers[index], *args, **kwargs))

        replaced = self._earlier(index, embedded, before)
        with torch.inference_mode(), _replaced({**replaced, self.layers[index]: wanted}):
            try:
                self.decoder(input_ids=ids.to(self.device), use_cache=False)
            except _Done as done:
                return self._activations(index, done.returned)
        raise AssertionError("the layer was not called")

    def check_logits(self) -> None:
        """Check that `logits`, which runs the class as a whole, can work.

        Raises:
            UnsupportedError: not in this release of transformers.
        """
        check_runs(import_transformers().__version__, type(self._model).__name__)

    def logits(self, ids: Tensor, before: Activations) -> Tensor:
        """What the model makes of what its last layer returned, within `head`.

        Args:
            ids: token ids [B, S], without padding.
            before: what the last layer returned for them.

        Returns:
            [B, S, V] in the dtype that the class returns. NaN where it uses the embedding, or what
            an earlier layer returned, after its layers.
        """
        shape = (*ids.shape, self.source.model.moe.hidden)
        unknown = torch.full((), float("nan"), dtype=self.dtype, device=self.device).expand(shape)
        replaced = self._earlier(len(self.layers), unknown, before)
        with torch.inference_mode(), _replaced(replaced):
            return cast(
                "Tensor", self._model(input_ids=ids.to(self.device), use_cache=False).logits
            )

    def loading_bytes(self, index: int) -> int:
        """Upper bound of the memory of a layer, with what loading it takes."""
        return self._weights.loading_bytes(self.layers[index])

    @cached_property
    def embedding_bytes(self) -> int:
        """The size of the embedding in memory."""
        return size_bytes(self._embedding)

    @cached_property
    def rest_bytes(self) -> int:
        """The size of what `load_rest` loads."""
        parts = (self._embedding, *self.layers)
        return size_bytes(self.decoder) - sum(map(size_bytes, parts))

    @property
    def scores_per_pair(self) -> int:
        """Numbers that attention keeps for each pair of tokens in a sequence, at most."""
        config = self.decoder.config
        # A mask, or the scores of all heads: before and after masking, as floats, and softmax.
        return 4 * config.num_attention_heads if config._attn_implementation == "eager" else 4

    def expert_parameters(self, index: int) -> dict[str, frozenset[str]]:
        """The parameters of a layer that hold the weights of its experts, by their names there.

        With each the projections that it holds: gate and up, or one of the three. Empty for a layer
        without experts.
        """
        prefix = self._weights.prefix(self.layers[index])
        found: dict[str, frozenset[str]] = {}
        for name, projections in self._projections.items():
            target, _ = self._weights.target_of.get(name, ("", None))
            if target.startswith(prefix):
                leaf = target.removeprefix(prefix)
                found[leaf] = found.get(leaf, frozenset()) | projections
        return found

    @property
    def vocabulary(self) -> int:
        """Number of logits, V."""
        return int(self._head.weight.shape[0])

    @property
    def head_bytes(self) -> int:
        """The size of the head in memory."""
        return size_bytes(self._head)

    @cached_property
    def _head(self) -> Any:
        head = self._model.get_output_embeddings()
        if head is None:
            raise UnsupportedError(
                f"{type(self._model).__name__}: no output embeddings, so it gives no logits"
            )
        return head

    @property
    def _head_is_tied(self) -> bool:
        """Whether the checkpoint holds the embedding alone, whose weight the head shares."""
        config, prefix = self._model.config, self._weights.prefix(self._head)
        tied = any(
            getattr(part, "tie_word_embeddings", False)
            for part in (config, config.get_text_config())
        )
        return tied and not any(t.startswith(prefix) for t, _ in self._weights.target_of.values())

    def _earlier(
        self, index: int, embedded: Tensor, before: Activations | None
    ) -> dict[nn.Module, Callable[..., object]]:
        """Forwards of the embedding, and of the layers before `index`, that return these."""
        before = None if before is None else _each(before, lambda tensor: tensor.to(self.device))
        unknown = None if before is None else _each(before, _nan_like)

        def earlier(position: int) -> Callable[..., object]:
            returned = before if position == index - 1 else unknown
            assert returned is not None, position
            return lambda *_, **__: returned

        replaced: dict[nn.Module, Callable[..., object]]
        replaced = {self._embedding: lambda *_, **__: embedded.to(self.device)}
        return replaced | {self.layers[i]: earlier(i) for i in range(index)}

    def _check_arguments(self, index: int, args: object, kwargs: object) -> None:
        for tensor in _tensors_in((args, kwargs)):
            if tensor.is_floating_point() and torch.isnan(tensor).any():
                raise UnsupportedError(
                    f"{self._path}: layer {index} of a {self.model_type} takes NaN: either a layer "
                    "before has computed it, or the layer takes what a layer before the previous "
                    "one returned, which is not kept; check the checkpoint's weights, and report "
                    "a model that needs it"
                )

    def _activations(self, index: int, returned: object) -> Activations:
        several = returned if isinstance(returned, tuple) else (returned,)
        if all(part is None or isinstance(part, torch.Tensor) for part in several):
            return cast("Activations", returned)
        raise UnsupportedError(
            f"layer {index} of a {self.model_type} returns a {type(returned).__name__}; only a "
            "tensor, or a tuple of tensors, can be kept between layers"
        )


class _Done(Exception):  # noqa: N818 - not an error
    """Ends a forward; carries what the wanted layer returned."""

    def __init__(self, returned: object) -> None:
        super().__init__()
        self.returned = returned


def _build(transformers: ModuleType, config: Any, dtype: torch.dtype) -> Any:
    """The model on the meta device, as `from_pretrained` builds it before it loads weights."""
    found: Any = model_class(transformers, config)
    with ExitStack() as stack:
        for context in found.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        stack.enter_context(building(found.__name__))
        model = found(config)
    return model.eval().requires_grad_(False)


def _layers(decoder: nn.Module) -> nn.ModuleList:
    layers = getattr(decoder, "layers", getattr(decoder, "blocks", None))
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(
            f"{type(decoder).__name__}: neither `layers` nor `blocks` is a list of layers, so they "
            "cannot be loaded one by one"
        )
    return layers


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Replace the forwards of modules for as long as the context lasts."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def _each(activations: Activations, change: Callable[[Tensor], Tensor]) -> Activations:
    if isinstance(activations, torch.Tensor):
        return change(activations)
    return tuple(None if tensor is None else change(tensor) for tensor in activations)


def _nan_like(tensor: Tensor) -> Tensor:
    """NaN in the shape of a tensor, in the memory of one element; of integers the largest."""
    value = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner)
