"""Weights of modules of a transformers model on the meta device, given and taken away.

Decisions, each with the failure it prevents:

* Weights are renamed and merged by transformers' own conversion. Otherwise this module would have
  to know the names of every architecture.
* Experts that the conversion would only stack are stacked here, one after the other. Otherwise a
  layer's experts would be in memory twice.
* Tensors are read one target at a time, not by transformers' threads. Otherwise a whole layer
  would be in memory twice.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moequant.errors import CheckpointError
from moequant.integrations.transformers_library import import_transformers, no_progress_bar
from moequant.storage.checkpoint import natural_key
from moequant.storage.disk import libc_function

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moequant.integrations.stored_tensors import StoredStack, StoredTensor

_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
"""The environment variable that makes transformers read tensors when it needs them."""


class ModuleWeights:
    """Loads the modules of one model, each for as long as it is needed.

    Args:
        model: on the meta device, as transformers builds it.
        decoder: the module of it that can initialize buffers.
        stored: the tensors of the checkpoint, by name.
        dtype: of weights in memory.
        device: where they go.
    """

    def __init__(
        self,
        model: Any,
        decoder: Any,
        stored: Mapping[str, StoredTensor | StoredStack],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._stored = stored
        self._dtype = dtype
        self._device = device

    @contextmanager
    def loaded(
        self, module: nn.Module, *, without: tuple[nn.Module, ...] = ()
    ) -> Iterator[nn.Module]:
        """Load a module for as long as the context lasts; raises as `load`."""
        self.load(module, without=without)
        try:
            yield module
        finally:
            module.to("meta")
            _return_freed_memory()

    def load(self, module: nn.Module, *, without: tuple[nn.Module, ...] = ()) -> None:
        """Give a module of the model its weights and buffers.

        Args:
            module: part of the model.
            without: parts of the module that get none.

        Raises:
            CheckpointError: a tensor is missing, unreadable or of another shape.
        """
        prefix = self.prefix(module)
        left_out = tuple(self.prefix(other) for other in without)
        others: dict[str, StoredTensor | StoredStack] = {}
        merged: dict[str, dict[str, list[str]]] = {}
        for name, (target, pattern) in self.target_of.items():
            if not target.startswith(prefix) or target.startswith(left_out):
                continue
            if pattern is not None and self._merge_of(target, pattern) is not None:
                merged.setdefault(target, {}).setdefault(pattern, []).append(name)
            else:
                others[name] = self._stored[name]
        _load_tensors(self._model, others, self._dtype, self._device)
        for target, names in merged.items():
            self._merge(target, names)
        skipped = {id(inner) for other in without for inner in other.modules()}
        for name, inner in module.named_modules():
            if id(inner) not in skipped:
                self._fill_buffers(inner)
                check_complete(f"{prefix}{name}", inner)

    def loading_bytes(self, module: nn.Module) -> int:
        """Upper bound of the memory of a module, with what loading it takes."""
        prefix = self.prefix(module)
        known, sources = self._model.state_dict(), Counter(t for t, _ in self.target_of.values())
        temporary = 0
        for target, pattern in set(self.target_of.values()):
            if not target.startswith(prefix):
                continue
            target_bytes = known[target].nbytes
            if self._merge_of(target, pattern) is not None:
                # One expert, as read, decoded and copied.
                temporary = max(temporary, 6 * target_bytes // sources[target])
            else:
                temporary = max(temporary, target_bytes if pattern is None else 2 * target_bytes)
        return size_bytes(module) + temporary

    def prefix(self, module: nn.Module) -> str:
        """How names of the parameters of a module begin in the model."""
        (name,) = (name for name, inner in self._model.named_modules() if inner is module)
        return f"{name}."

    @cached_property
    def target_of(self) -> dict[str, tuple[str, str | None]]:
        """For each stored tensor the parameter or buffer that it goes into, and by which rule."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        mapping = _mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        known = self._model.state_dict()
        found = {}
        for name in self._stored:
            for rules in ((renamings, converters), ([], [])):
                target, pattern = rename_source_key(
                    name, *rules, self._model.base_model_prefix, known
                )
                if target in known:
                    found[name] = (target, pattern)
                    break
        return found

    def _merge_of(self, target: str, pattern: str | None) -> tuple[str, ...] | None:
        """How experts are merged into a parameter [E, N, K], if one after the other; else None.

        These are the patterns of transformers' rule, in the order in which their rows follow.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist

        rule = None if pattern is None else self._rules[pattern]
        parameter = self._model.get_parameter_or_buffer(target)
        if rule is None or parameter.ndim != 3:
            return None
        merges = [isinstance(op, MergeModulelist) and op.dim == 0 for op in rule.operations[:1]]
        merges += [isinstance(op, Concatenate) and op.dim == 1 for op in rule.operations[1:]]
        whole = len(merges) == (1 if len(rule.source_patterns) == 1 else 2)
        return tuple(rule.source_patterns) if whole and all(merges) else None

    def _merge(self, target: str, names: Mapping[str, list[str]]) -> None:
        """Fill a parameter expert by expert, where transformers would join copies of all.

        Raises:
            CheckpointError: an expert is missing, or has another shape.
        """
        module_name, _, leaf = target.rpartition(".")
        module = self._model.get_submodule(module_name)
        shape = getattr(module, leaf).shape
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        for pattern in self._merge_of(target, next(iter(names))) or ():
            experts = sorted(names.get(pattern, ()), key=natural_key)
            height = 0
            for index, name in enumerate(experts):
                weight = self._stored[name][...]
                height = weight.shape[0]
                place = whole[index, row : row + height] if index < len(whole) else whole[:0]
                if place.shape != weight.shape:
                    raise CheckpointError(
                        f"{name}: {list(weight.shape)} does not fit into {target} {list(shape)} of "
                        "transformers; config.json does not match the weights, fetch the "
                        "checkpoint again"
                    )
                place.copy_(weight)
            if len(experts) != len(whole):
                raise CheckpointError(
                    f"{target}: {len(experts)} experts in the checkpoint, but {len(whole)} in "
                    "transformers' model; fetch the checkpoint again"
                )
            row += height
        if row != shape[1]:
            raise CheckpointError(
                f"{target}: {row} rows of an expert in the checkpoint, but {shape[1]} in "
                "transformers' model; fetch the checkpoint again"
            )
        parameter = nn.Parameter(whole, requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(module, leaf, parameter)

    def _fill_buffers(self, module: nn.Module) -> None:
        """Compute the buffers of a module that no checkpoint holds, such as rotary frequencies."""
        missing = [
            name
            for name in module._non_persistent_buffers_set
            if (buffer := getattr(module, name)) is not None and buffer.is_meta
        ]
        if not missing:
            return
        for name in missing:
            module._buffers[name] = torch.empty_like(getattr(module, name), device=self._device)
        from transformers.initialization import guard_torch_init_functions

        with guard_torch_init_functions(), torch.no_grad():
            # Leaves alone what was loaded.
            self._decoder._init_weights(module)

    @cached_property
    def _rules(self) -> dict[str, Any]:
        """Transformers' rules that merge or split tensors, by the patterns of their names."""
        from transformers.core_model_loading import WeightConverter

        rules = [entry for entry in _mapping(self._model) if isinstance(entry, WeightConverter)]
        return {pattern: rule for rule in rules for pattern in rule.source_patterns}


def _mapping(model: Any) -> list[Any]:
    """Transformers' rules for names and merges of a checkpoint's tensors."""
    import_transformers()
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _load_tensors(
    model: Any,
    tensors: Mapping[str, StoredTensor | StoredStack],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load some tensors of a model by transformers' own conversion.

    Raises:
        CheckpointError: a tensor has another shape than the model, or cannot be converted.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=_mapping(model),
    )
    with no_progress_bar(), _environment(_SYNCHRONOUS, "1"), torch.no_grad():
        report, _ = convert_and_load_state_dict_in_model(
            model=model, state_dict=tensors, load_config=config, disk_offload_index=None
        )
    faults = [
        *map(str, report.mismatched_keys),
        *map(str, report.conversion_errors),
        *report.error_msgs,
    ]
    if faults:
        raise CheckpointError(
            f"{type(model).__name__}: cannot load {', '.join(sorted(faults))}; config.json does "
            "not match the weights, fetch the checkpoint again"
        )


def check_complete(name: str, module: nn.Module) -> None:
    """Check that every parameter and buffer of a module, without those of inner ones, has data.

    Raises:
        CheckpointError: one has none, because no tensor of the checkpoint goes there.
    """
    for leaf, tensor in [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]:
        if tensor.is_meta:
            raise CheckpointError(
                f"{name.rstrip('.')}.{leaf}: no tensor of the checkpoint goes there; config.json "
                "does not match the weights, fetch the checkpoint again"
            )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _return_freed_memory() -> None:
    """Give freed memory back to the system, on Linux.

    The C library keeps it, in pieces between what is still in use. Without this, the memory of a
    process that loads one layer of 2.4 GB after the other has grown by 570 MB after 24 layers.
    """
    if (trim := libc_function("malloc_trim")) is not None:
        trim(0)


def size_bytes(module: nn.Module) -> int:
    """The size of a module in memory."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
