"""The weights of a layer's experts, checked to fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from moequant.act_fn import SILU, ActFn
from moequant.arguments import check_tensor
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import RUNNABLE, QuantizedWeight, check_parts, get_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


BIAS_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Gate, up and down projections of E experts, in one format and row-major as on disk.

    Attributes:
        gate: [E, I, H], also called w1; None where `act_fn` is not gated.
        up: [E, I, H], also called w3.
        down: [E, H, I], also called w2.
        gate_bias: [E, I] float32 or bfloat16, added to the float32 sum of the GEMM; None is 0.
        up_bias: [E, I], likewise.
        down_bias: [E, H], likewise, before the router's weight.
        act_fn: the function between the GEMMs.
        gate_up_input_scale: [1] or [E] float32, a multiplier: the static scale of the activations
            that are the input of gate and up, for fp8_tensor, or their global scale, for nvfp4. Of
            several, fp8_tensor uses the largest for all experts, as in vLLM, because tokens are
            quantized before they go to experts; it must be positive. nvfp4 uses each expert's own.
            If None, every token has its own scale.
        down_input_scale: the same for the input of down; both are given, or none.

    Raises:
        CheckpointError: shapes that contradict each other, or parts that are not what the format
            makes of a weight of that shape.
        UnsupportedError: the projections differ in format or device, no format is called that, or
            there is a gate where `act_fn` has none, or none where it has one; or something here is
            not of its type.
    """

    gate: QuantizedWeight | None = None
    up: QuantizedWeight
    down: QuantizedWeight
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    act_fn: ActFn = SILU
    gate_up_input_scale: Tensor | None = None
    down_input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        self.act_fn.check()
        if self.act_fn.gated == (self.gate is None):
            found = "no gate" if self.gate is None else "a gate"
            raise UnsupportedError(
                f"activation function {self.act_fn} and {found}: a gated function needs "
                "gate, up and down, any other up and down"
            )
        _check_same_format(self.projections())
        _check_shapes(self.projections())
        for name, q in self.projections().items():
            check_parts(q.tensors(), q.format, q.shape, name)
        for name, bias in self.biases().items():
            _check_bias(name, bias, self.projections())
        _check_input_scales(self.input_scales(), self.format, self.experts)
        _check_same_device(self.tensors())

    @classmethod
    def of(
        cls, projections: Mapping[str, QuantizedWeight], act_fn: ActFn, **tensors: Tensor | None
    ) -> ExpertWeights:
        """Experts from weights by projection, and biases and input scales by field."""
        fields: dict[str, Any] = {**projections, **tensors}
        return cls(**fields, act_fn=act_fn)

    def projections(self) -> dict[str, QuantizedWeight]:
        """The two or three weights by name."""
        gate = {} if self.gate is None else {"gate": self.gate}
        return {**gate, "up": self.up, "down": self.down}

    def biases(self) -> dict[str, Tensor]:
        """The biases there are, by field name."""
        return self._given("gate_bias", "up_bias", "down_bias")

    def input_scales(self) -> dict[str, Tensor]:
        """The static scales of activations there are, by field name."""
        return self._given("gate_up_input_scale", "down_input_scale")

    def _given(self, *names: str) -> dict[str, Tensor]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def static_scale(self, of: Literal["gate_up", "down"], e: int | None = None) -> Tensor | None:
        """The static scale, [1], of the input of gate and up, or of down; None for none.

        Args:
            of: of which.
            e: an expert, for its own; None for the largest of all.
        """
        scale = self.gate_up_input_scale if of == "gate_up" else self.down_input_scale
        if scale is None:
            return None
        return scale.amax(0, keepdim=True) if e is None else scale.expand(self.experts)[e : e + 1]

    def with_input_scales(self, scales: Mapping[str, Tensor]) -> ExpertWeights:
        """The same experts with these static scales of activations, by field name, and no others.

        Raises:
            UnsupportedError: the format takes none.
            CheckpointError: one of another shape or dtype, or without the other.
        """
        return ExpertWeights.of(self.projections(), self.act_fn, **self.biases(), **scales)

    def tensors(self) -> dict[str, Tensor]:
        """Every part that holds data, as `gate_qdata` or `up_bias`."""
        parts = {
            f"{name}_{part}": tensor
            for name, q in self.projections().items()
            for part, tensor in q.tensors().items()
        }
        return {**parts, **self.biases(), **self.input_scales()}

    def replace(self, tensors: Mapping[str, Tensor]) -> ExpertWeights:
        """The same experts with `tensors`, named as in `tensors()`, for their data.

        Raises:
            UnsupportedError: `tensors` is no mapping, a name is missing, or is none of theirs, or
                a value is no dense tensor.
            CheckpointError: a tensor of another shape or dtype.
        """
        known = self.tensors()
        if not isinstance(tensors, Mapping):
            raise UnsupportedError(
                f"tensors is {type(tensors).__name__}, but must be a mapping, as of tensors()"
            )
        if tensors.keys() != known.keys():
            wrong = [str(name) for name in tensors if name not in known]
            missing = [name for name in known if name not in tensors]
            found = f"has {', '.join(wrong)}" if wrong else f"lacks {', '.join(missing)}"
            raise UnsupportedError(
                f"tensors {found}, but these experts have {', '.join(known)}; give all of them, "
                "and no other"
            )
        for name, tensor in tensors.items():
            check_tensor(name, tensor)

        def rebuilt(name: str, q: QuantizedWeight) -> QuantizedWeight:
            return QuantizedWeight(
                format=q.format,
                qdata=tensors[f"{name}_qdata"],
                scale=tensors[f"{name}_scale"],
                global_scale=None if q.global_scale is None else tensors[f"{name}_global_scale"],
                shape=q.shape,
            )

        return ExpertWeights.of(
            {name: rebuilt(name, q) for name, q in self.projections().items()},
            self.act_fn,
            **{name: tensors[name] for name in (*self.biases(), *self.input_scales())},
        )

    @property
    def format(self) -> str:
        """Name of the format of all projections."""
        return self.up.format

    @property
    def experts(self) -> int:
        """E, the number of experts here."""
        return self.up.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.up.shape[2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.up.shape[1]

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return self.up.qdata.device


def weights_without_data(
    format: str,
    shapes: Mapping[str, Sequence[int]],
    act_fn: ActFn,
    *,
    biased: bool = False,
    static: bool = False,
    device: str = "meta",
) -> ExpertWeights:
    """Experts without values, of which a layout makes tensors that show dtypes and shapes.

    Args:
        format: of the projections.
        shapes: [E, N, K] of each projection, "gate" only where `act_fn` is gated.
        act_fn: the function between the GEMMs.
        biased: whether every projection has a bias, float32.
        static: whether there are static scales of activations, one for each expert.
        device: where they are; "cpu" for E = 0 alone, which spares the seconds that torch takes to
            import what computes on "meta".

    Raises:
        UnsupportedError: the format does not support a shape.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    weights, tensors = {}, {}
    for name, shape in shapes.items():
        specs = get_format(format).specs(shape, name).items()
        parts: dict[str, Any] = {part: empty(*s.shape, dtype=s.dtype) for part, s in specs}
        weights[name] = QuantizedWeight(format=format, shape=torch.Size(shape), **parts)
        if biased:
            tensors[f"{name}_bias"] = empty(*shape[:2])
    if static:
        scales = shapes["up"][0] or 1  # without experts, one for all of them is allowed
        tensors |= {f"{of}_input_scale": empty(scales) for of in ("gate_up", "down")}
    return ExpertWeights.of(weights, act_fn, **tensors)


def _check_types(weights: ExpertWeights) -> None:
    for name, value in vars(weights).items():
        expected: type = QuantizedWeight if name in ("gate", "up", "down") else torch.Tensor
        if name == "act_fn":
            expected = ActFn
        absent = value is None and name not in ("up", "down", "act_fn")
        if not absent and not isinstance(value, expected):
            raise UnsupportedError(
                f"{name} is {type(value).__name__}, but must be {expected.__name__}"
            )
        if isinstance(value, QuantizedWeight):
            _check_parts_are_typed(name, value)


def _check_parts_are_typed(name: str, q: QuantizedWeight) -> None:
    for field, value, expected in (("format", q.format, str), ("shape", q.shape, (list, tuple))):
        if not isinstance(value, expected):
            wanted = "a name" if field == "format" else "[E, N, K]"
            raise UnsupportedError(
                f"{name}.{field} is {type(value).__name__}, but must be {wanted}"
            )
    # Of every format, also of plain ones: there the scale is 1, as plain_weight makes it.
    for part, tensor in q.tensors().items():
        check_tensor(f"{name}.{part}", tensor)


def _check_same_format(weights: dict[str, QuantizedWeight]) -> None:
    formats = {name: q.format for name, q in weights.items()}
    if len(set(formats.values())) > 1:
        found = ", ".join(f"{name} {format}" for name, format in formats.items())
        raise UnsupportedError(
            f"the projections of a layer share one format, but here: {found}; "
            "convert all three by one rule"
        )
    check_runnable(next(iter(formats.values())))


def check_runnable(format: str) -> None:
    """Refuse weights of a format that no backend runs.

    Raises:
        UnsupportedError: experts do not run in it, or no format is called that.
    """
    if format not in RUNNABLE:
        get_format(format)
        raise UnsupportedError(
            f"experts cannot run in {format}, only in {', '.join(RUNNABLE)}; convert them"
        )


def _check_shapes(weights: dict[str, QuantizedWeight]) -> None:
    first = next(iter(weights))  # gate, or up where there is none
    shape = list(weights[first].shape)
    if len(shape) != 3 or 0 in shape[1:]:
        raise CheckpointError(
            f"{first} is {shape}, but experts are [E, I, H] with I and H at least 1"
        )
    experts, intermediate, hidden = shape
    for name, expected in (("up", shape), ("down", [experts, hidden, intermediate])):
        if list(weights[name].shape) != expected:
            raise CheckpointError(
                f"{name} is {list(weights[name].shape)}, but {first} is {shape}, so {name} must be "
                f"{expected}"
            )


def _check_bias(name: str, bias: Tensor, weights: dict[str, QuantizedWeight]) -> None:
    projection = name.removesuffix("_bias")
    if projection not in weights:
        raise CheckpointError(f"{name} is given, but there is no {projection}")
    expected = list(weights[projection].shape[:2])
    if list(bias.shape) != expected:
        raise CheckpointError(
            f"{name} is {list(bias.shape)}, but {projection} is {list(weights[projection].shape)}, "
            f"so {name} must be {expected}"
        )
    if bias.dtype not in BIAS_DTYPES:
        raise CheckpointError(f"{name} is {bias.dtype}, but must be float32 or bfloat16")


def _check_input_scales(scales: dict[str, Tensor], format: str, experts: int) -> None:
    if not scales:
        return
    if get_format(format).static_activations is None:
        takers = " and ".join(n for n, f in RUNNABLE.items() if f.static_activations)
        raise UnsupportedError(
            f"{next(iter(scales))} is given, but the weights are {format}: only {takers} take "
            "static scales of activations; leave them out"
        )
    if len(scales) == 1:
        raise CheckpointError(
            f"only {next(iter(scales))} is given; gate_up_input_scale and down_input_scale go "
            "together"
        )
    for name, scale in scales.items():
        if scale.dtype != torch.float32:
            raise CheckpointError(f"{name} is {scale.dtype}, but must be float32")
        if list(scale.shape) not in ([1], [experts]) or not scale.numel():
            raise CheckpointError(
                f"{name} is {list(scale.shape)}, but must be [1], or [{experts}] with one for each "
                "expert"
            )


def _check_same_device(tensors: dict[str, Tensor]) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedError(f"the weights of a layer share one device, but here: {found}")
