"""A converted checkpoint, read as an engine reads it: from disk, through its dialect."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from moequant.dialects import find_dialect
from moequant.dialects.base import no_activations
from moequant.dialects.names import ACTIVATION_SCALES
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import (
    ROUTED_EXPERTS,
    Place,
    find_architecture,
    read_architectures,
    recorded_architectures,
)
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.documents import read_document
from moequant.storage.files import CONFIG_FILE, RECORD_FILE
from moequant.storage.headers import DTYPES
from moequant.storage.reader import FixedFile
from moequant.weights.encoded import EncodedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from moequant.dialects.base import Dialect
    from moequant.dialects.tensors import Block
    from moequant.formats import QuantizedWeight
    from moequant.models import Architecture, MoeConfig, TensorRole
    from moequant.storage.checkpoint import TensorRange

NOT_TOGETHER = "the weights and config.json do not belong together; fetch the checkpoint again"


@dataclass(frozen=True, kw_only=True)
class ConvertedCheckpoint:
    """A checkpoint with a `quantization_config` we can read.

    Attributes:
        checkpoint: its files.
        dialect: the dialect its config.json is written in.
        architecture: the family it belongs to.
        moe: sizes of its expert layers.
        format_of: the format config.json gives a module, or None for one that is not quantized.
        activations_of: the scheme of a module's input, where config.json says one that its format
            does not imply; else None.
        block_of: rows and columns that share a scale of a module, where config.json states them.
    """

    checkpoint: Checkpoint
    dialect: Dialect
    architecture: Architecture
    moe: MoeConfig
    format_of: Callable[[str], str | None]
    activations_of: Callable[[str], str | None] = no_activations
    block_of: Callable[[str], Block | None] = lambda module: None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        architecture: str | Path | None = None,
        quantized_activations: bool = False,
    ) -> ConvertedCheckpoint:
        """Read config and headers.

        Args:
            path: its directory.
            architecture: see `of`.
            quantized_activations: see `of`.

        Raises:
            ArchitectureError: the file `architecture`, or the record, is invalid.
            CheckpointError: not a checkpoint, or one without a `quantization_config`.
            UnsupportedError: an unknown architecture or quantization.
        """
        return cls.of(
            Checkpoint.open(path),
            architecture=architecture,
            quantized_activations=quantized_activations,
        )

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        architecture: str | Path | None = None,
        quantized_activations: bool = False,
    ) -> ConvertedCheckpoint:
        """Read what the config of an open checkpoint says.

        Args:
            checkpoint: which. Names of its tensors are looked at only where the config leaves
                a choice.
            architecture: a TOML file that describes its architecture; the default is the
                description in moequant.json, then the built-in table.
            quantized_activations: whether modules may have activations in NVFP4 or MXFP4, which
                `activations_of` then says; else `format_of` refuses them.

        Raises:
            ArchitectureError: the file `architecture`, or the record, is invalid.
            CheckpointError: a `quantization_config` is missing, or a record is damaged.
            UnsupportedError: an unknown architecture or quantization.
        """
        path = checkpoint.path
        own = described_architectures(path, architecture)
        found = find_architecture(checkpoint.config, own, names=checkpoint.tensors)
        quantization_config = checkpoint.config.get("quantization_config")
        if not isinstance(quantization_config, dict):
            raise CheckpointError(
                f"{path / CONFIG_FILE}: no quantization_config; this is not a converted "
                "checkpoint. Convert it first: moequant convert SOURCE OUTPUT --format NAME"
            )
        dialect = find_dialect(quantization_config, checkpoint.tensors)
        if quantized_activations:
            format_of, activations_of = readers(dialect, quantization_config)
        else:
            format_of, activations_of = dialect.reader(quantization_config), no_activations
        return cls(
            checkpoint=checkpoint,
            dialect=dialect,
            architecture=found,
            moe=found.read_config(checkpoint.config),
            format_of=format_of,
            activations_of=activations_of,
            block_of=dialect.block_reader(quantization_config),
        )

    def expert_layers(self) -> tuple[int, ...]:
        """Layers that hold experts; multi-token-prediction layers only if they are there."""
        return (*self.moe.sparse_layers, *filter(self.has_experts, self.moe.optional_layers))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is among `expert_layers`."""
        if layer not in self.moe.optional_layers:
            return layer in self.moe.sparse_layers
        begins = [f"{self.expert_module(layer, 0, 'down')}."]
        if self.architecture.stacked is not None:
            begins.append(self.architecture.stacked.tensor(layer, "down"))
        return any(name.startswith(tuple(begins)) for name in self.checkpoint.tensors)

    def expert_module(self, layer: int, expert: int, projection: str) -> str:
        """The module of one expert's gate, up or down."""
        return self.architecture.expert_tensor(layer, expert, projection).removesuffix(".weight")

    def format_of_experts(self, layer: int) -> str | None:
        """The format of a layer's routed experts; None where they were not converted."""
        return self.format_of(self.expert_module(layer, 0, "down"))

    def no_converted_experts(self, consequence: str) -> CheckpointError | UnsupportedError:
        """The error that by config.json no layer's experts are converted; its text ends so."""
        for layer in self.expert_layers():
            module = self.expert_module(layer, 0, "down")
            for suffix in sorted(self.dialect.telling_suffixes):
                if f"{module}.{suffix}" in self.checkpoint.tensors:
                    return undescribed(f"{module}.{suffix}")
        return UnsupportedError(
            f"{self.checkpoint.path}: by config.json no layer's experts are converted; "
            f"{consequence}"
        )

    def activations_of_experts(self, layer: int) -> str | None:
        """`activations_of` of a layer's routed experts.

        Raises:
            UnsupportedError: the experts differ in it.
        """
        if layer not in self._activations_by_layer:
            self._activations_by_layer[layer] = self._find_activations(layer)
        return self._activations_by_layer[layer]

    @cached_property
    def _activations_by_layer(self) -> dict[int, str | None]:
        # Kept, because a lookup for each expert takes a millisecond, and a layer's is asked twice.
        return {}

    def _find_activations(self, layer: int) -> str | None:
        if self.activations_of is no_activations:
            return None
        modules = [
            self.expert_module(layer, expert, projection)
            for expert in range(self.moe.experts)
            for projection in self.moe.projections
        ]
        found = {self.activations_of(module): module for module in modules}
        if len(found) > 1:
            several = " and ".join(f"{module} {scheme}" for scheme, module in found.items())
            raise UnsupportedError(
                f"the experts of a layer share one scheme of activations, but here: {several}; "
                'choose "none" for activations'
            )
        return next(iter(found))

    def read_input_scales(self, layer: int, experts: Sequence[int]) -> dict[str, Tensor]:
        """Static scales of activations, which multiply, of some experts of a layer.

        Gate and up have the same input; of their scales the larger counts, as in vLLM.

        Returns:
            `gate_up_input_scale` and `down_input_scale`, float32 [experts].

        Raises:
            CheckpointError: a scale is missing, or is not one floating-point number.
        """
        format = self.format_of_experts(layer)
        assert format is not None, "the layer was converted"
        modules = [
            self.expert_module(layer, expert, projection)
            for projection in self.moe.projections
            for expert in experts
        ]
        read = read_input_scales(self.checkpoint, self.dialect, modules, format)
        scales = dict(zip(self.moe.projections, read.view(-1, len(experts)), strict=True))
        down = scales.pop("down").clone()
        return {
            "gate_up_input_scale": torch.stack([*scales.values()]).amax(0),
            "down_input_scale": down,
        }

    def tensor_names(self, module: str, format: str) -> list[str]:
        """The tensors on disk that hold a converted module, alone or with others."""
        places = stored_places(self.architecture, self.moe, self.dialect, module, format)
        tensors = (place.tensor for place in places.values())
        return [tensor for tensor in tensors if tensor in self.checkpoint.tensors]

    def part_of(self, name: str) -> tuple[TensorRole, str] | None:
        """Role and format of the converted weights that a tensor holds a part of, or None.

        Raises:
            UnsupportedError: config.json gives it an unknown scheme, or it looks like an expert
                but matches no pattern of the architecture.
        """
        if stacked := self._part_of_stack(name):
            return stacked
        module = name.rpartition(".")[0]
        format = self.format_of(module)
        if format is None:
            return None
        parts = self.tensor_names(module, format)
        if len(parts) > 1 and name.rpartition(".")[2] in ACTIVATION_SCALES:
            parts.append(name)
        # Of embeddings and norms a config may say nothing; what has no scale was not converted.
        if name not in parts or len(parts) < 2:
            return None
        return self.architecture.classify(f"{module}.weight"), format

    def _part_of_stack(self, name: str) -> tuple[TensorRole, str] | None:
        if not self.dialect.stacks:
            return None
        for format in self.dialect.carried:
            for suffix in self.dialect.encoding(format).suffixes:
                # Without the suffix, it is the name of the plain stack.
                stack = name.removesuffix(f"_{suffix}")
                role = self.architecture.classify(stack) if stack != name else None
                if role is not None and role.role == ROUTED_EXPERTS:
                    return role, format
        return None

    def encoded(self, module: str) -> EncodedWeight:
        """Where the tensors of a converted module lie.

        Tensors that are missing are left out: some are optional, and the dialect reports the
        others. Tensors that stack experts are all named.

        Raises:
            UnsupportedError: config.json says that the module is not quantized.
        """
        format = self.format_of(module)
        if format is None:
            raise UnsupportedError(f"{module}: not converted; config.json leaves it as it was")
        places = stored_places(self.architecture, self.moe, self.dialect, module, format)
        tensors = self.checkpoint.tensors
        return EncodedWeight(
            module=module,
            format=format,
            dialect=self.dialect,
            places={n: p for n, p in places.items() if p.expert is not None or p.tensor in tensors},
            block=self.block_of(module),
        )

    def read(self, module: str) -> QuantizedWeight:
        """Read one converted weight.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype or shape than it must have.
            UnsupportedError: config.json says that the module is not quantized.
        """
        return self.encoded(module).read(self.checkpoint)

    def read_expert(self, layer: int, expert: int, projection: str) -> QuantizedWeight:
        """Read one expert's gate, up or down, [N, K].

        Raises:
            CheckpointError: as `read`, or the shape is not what config.json says.
            UnsupportedError: as `read`.
        """
        q = self.read(self.expert_module(layer, expert, projection))
        self.check_expert(q, layer, expert, projection)
        return q

    def check_expert(self, q: QuantizedWeight, layer: int, expert: int, projection: str) -> None:
        """Check that an expert's gate, up or down has the shape in config.json.

        Raises:
            CheckpointError: it has another.
        """
        wanted = self.moe.shape(projection)
        if tuple(q.shape) != wanted:
            raise CheckpointError(
                f"{self.expert_module(layer, expert, projection)}: holds {list(q.shape)}, but "
                f"config.json gives the {projection} projection of an expert the shape "
                f"{list(wanted)}; convert the checkpoint again, or correct its config.json"
            )

    @property
    def has_biases(self) -> bool:
        """Whether the architecture's experts have biases."""
        return self.architecture.stacked is not None and self.architecture.stacked.biased

    def read_biases(self, layer: int) -> dict[str, Tensor] | None:
        """Biases of all experts of a layer, or None where the architecture has none.

        Returns:
            By projection, float32: gate and up [E, I], down [E, H].

        Raises:
            CheckpointError: a bias is missing, or has another shape than config.json gives.
        """
        stacked = self.architecture.stacked
        if stacked is None or not stacked.biased:
            return None
        biases = {}
        for projection in self.moe.projections:
            name = stacked.bias(layer, projection)
            wanted = stacked.bias_shape(stacked.stack_of(projection), self.moe)
            if self.checkpoint.info(name).shape != wanted:
                raise CheckpointError(
                    f"{name}: shape {list(self.checkpoint.info(name).shape)}, but config.json "
                    f"makes it {list(wanted)}; fetch or convert the checkpoint again"
                )
            rows = stacked.rows(projection, self.moe.intermediate)
            bias = self.checkpoint.read(name).float()
            if rows is not None:
                bias = bias[:, rows.start : rows.stop : rows.step]
            biases[projection] = bias.contiguous()
        return biases


def undescribed(tensor: str) -> CheckpointError:
    """That a tensor is part of a quantized weight, but config.json has no format of it."""
    return CheckpointError(
        f"{tensor}: belongs to a quantized weight, but quantization_config says that its module is "
        f"not quantized; {NOT_TOGETHER}"
    )


def readers(
    dialect: Dialect, quantization_config: Mapping[str, Any]
) -> tuple[Callable[[str], str | None], Callable[[str], str | None]]:
    """`format_of` and `activations_of` of a `ConvertedCheckpoint` with quantized activations.

    Raises:
        CheckpointError: a field of the config has the wrong type.
    """
    format_of = dialect.reader(quantization_config)
    activations_of = dialect.activations_reader(quantization_config)
    of_weights = dialect.reader(quantization_config, weights_only=True)
    return lambda m: format_of(m) if activations_of(m) is None else of_weights(m), activations_of


def read_input_scales(
    checkpoint: Checkpoint, dialect: Dialect, modules: Sequence[str], format: str
) -> Tensor:
    """The static scales of modules' inputs, which multiply: [modules] float32.

    Args:
        checkpoint: where they lie.
        dialect: the checkpoint's, which has such scales beside `format`.
        modules: the modules of weights.
        format: the weights'.

    Raises:
        CheckpointError: one is missing, or is not one floating-point number.
    """
    scale = dialect.input_scale(format)
    assert scale is not None, (modules[0], format)
    places = [_locate_input_scale(checkpoint, scale.name_of(module)) for module in modules]
    return scale.multiplier(_read_numbers(places))


def _locate_input_scale(checkpoint: Checkpoint, name: str) -> TensorRange:
    """Where a static scale lies; errors as `read_input_scales`."""
    if name not in checkpoint.tensors:
        raise CheckpointError(
            f"{name}: not there, but config.json says that activations have a static scale; "
            'calibrate the checkpoint again, or choose "none" for activations'
        )
    where = checkpoint.locate(name)
    dtype, shape = DTYPES[where.info.dtype], where.info.shape
    if math.prod(shape) != 1 or not dtype.is_floating_point:
        raise CheckpointError(
            f"{name}: {dtype} of shape {list(shape)}, but a static scale is one floating-point "
            "number; fetch the checkpoint again"
        )
    return where


def _read_numbers(places: Sequence[TensorRange]) -> Tensor:
    """Tensors of one floating-point number each, in this order, as float32.

    Files are read from their beginnings to their ends, opened once a dtype: single reads take
    fifty microseconds each, and a layer has hundreds of these tensors.
    """
    numbers = torch.empty(len(places), dtype=torch.float32, device="cpu")
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in sorted(range(len(places)), key=lambda index: places[index].info.start):
        info = places[index].info
        groups[info.file, info.dtype].append(index)
    for (_, dtype), indices in groups.items():
        ranges = [(places[i].info.start, places[i].info.stop) for i in indices]
        data = places[indices[0]].file.read_ranges(ranges)
        numbers[indices] = torch.frombuffer(data, dtype=DTYPES[dtype]).float()
    return numbers


def described_architectures(path: Path, file: str | Path | None = None) -> tuple[Architecture, ...]:
    """The architectures in a user's file, else the one in moequant.json, if any.

    Raises:
        ArchitectureError: the file, or the record, is invalid.
        CheckpointError: moequant.json cannot be read.
    """
    if file is not None:
        return read_architectures(file)
    record = path / RECORD_FILE
    if not record.is_file():
        return ()
    definition = read_document(FixedFile.at(record)).get("architecture_definition")
    return recorded_architectures(definition, str(record))


def stored_places(
    architecture: Architecture, moe: MoeConfig, dialect: Dialect, module: str, format: str
) -> dict[str, Place]:
    """Where each tensor of a converted module lies, by the dialect's name for it."""
    names = {suffix: f"{module}.{suffix}" for suffix in dialect.encoding(format).suffixes}
    role = architecture.classify(f"{module}.weight") if dialect.stacks else None
    if role is None or role.expert is None:
        return {name: Place(tensor=name) for name in names.values()}
    stacked = architecture.stacked
    if stacked is None:
        raise UnsupportedError(
            f"{module}: the dialect {dialect.name} stacks the experts of a layer, and architecture "
            f"{architecture.name!r} has no names for that; choose another dialect"
        )
    assert role.layer is not None, module
    assert role.projection is not None, module
    tensor = stacked.tensor(role.layer, role.projection)
    specs = dialect.specs(module, format, moe.shape(role.projection))
    rows = stacked.bias_shape(stacked.stack_of(role.projection), moe)
    return {
        name: Place(
            tensor=f"{tensor}_{suffix}",
            expert=role.expert,
            rows=stacked.rows(role.projection, moe.intermediate),
            extents=(*rows, *specs[name].shape[1:]),
        )
        for suffix, name in names.items()
    }
