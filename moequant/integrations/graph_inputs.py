"""What a captured decoding step depends on: its arguments, its cache, and the model's weights.

`GraphWeights` does not hold the experts that graphs read. Otherwise weights that were moved off a
device would stay there as long as a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.integrations.static_cache import CACHE_NAMES, DECODE_EAGERLY
from moequant.runtime import FusedExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from transformers import Cache, PreTrainedModel

    from moequant.runtime.backends import PackedExperts


def kind_of(value: Any, name: str = "inputs") -> Hashable:
    """Equal for inputs that one graph can run: shapes and dtypes of tensors, and other values.

    Raises:
        UnsupportedError: an argument that can be neither copied into a graph nor compared.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if name in CACHE_NAMES:
        return None
    if isinstance(value, dict):
        return tuple((key, kind_of(value[key], key)) for key in sorted(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedError(
        f"a decoding step has the argument {name} of type {type(value).__name__}, which no CUDA "
        f"graph repeats; leave it out, or {DECODE_EAGERLY}"
    )


def tensors_of(inputs: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors among arguments, and in dicts of them, by place."""
    found: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        elif isinstance(value, dict):
            found |= tensors_of(value, f"{prefix}{name}.")
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each tensor in its dicts, lists and tuples changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(part, change) for part in value)
    return value


def host_state(cache: Cache) -> list[dict[str, Hashable]]:
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


class GraphWeights:
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

    def is_as_before(self, before: GraphWeights) -> bool:
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
