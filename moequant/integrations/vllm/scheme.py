"""How the routed experts of a layer are stored, as moequant's dialects read config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant.dialects import find_dialect, get_dialect
from moequant.formats import STATIC_SCHEMES
from moequant.runtime.activations import MXFP4, MXFP8, NVFP4, NVFP4_STATIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.dialects import Dialect
    from moequant.dialects.encodings import Encoding
    from moequant.dialects.input_scale import InputScale
    from moequant.runtime.activations import ActivationsChoice

_CHOICES: dict[str, ActivationsChoice] = {NVFP4_STATIC: NVFP4, MXFP4: MXFP4, MXFP8: MXFP8}
"""What callers of `FusedExperts` ask for, by the scheme."""
_EXPERT = "model.layers.0.mlp.experts.0.down_proj"
"""Stands for every expert of the layer: vLLM has already said that the config is for them."""


@dataclass(frozen=True, kw_only=True)
class ExpertScheme:
    """How a layer's experts are stored, and how their activations are quantized.

    Attributes:
        dialect: of config.json.
        format: name of the format of the weights.
        activations: a scheme of `moequant.runtime.activations`, where config.json says one that
            the format does not imply; else None.
    """

    dialect: Dialect
    format: str
    activations: str | None = None

    @property
    def encoding(self) -> Encoding:
        """The tensors of a weight on disk."""
        return self.dialect.encodings[self.format]

    @property
    def has_input_scales(self) -> bool:
        """Whether the checkpoint has static scales of activations."""
        return self.activations in STATIC_SCHEMES

    def choose(self, asked: ActivationsChoice) -> ActivationsChoice:
        """What "format" stands for, where config.json says more than the format; else as asked."""
        if asked != "format" or self.activations is None:
            return asked
        # With static scales, the format's own choice takes them.
        return _CHOICES.get(self.activations, asked)

    def uses_input_scales(self, asked: ActivationsChoice) -> bool:
        """Whether the static scales belong to the weights for these activations."""
        takes = NVFP4 if self.activations == NVFP4_STATIC else "format"
        return self.has_input_scales and self.choose(asked) == takes

    @property
    def input_scale(self) -> InputScale | None:
        """The tensor with a static scale of an expert's input; None where there is none."""
        return self.dialect.input_scale(self.format) if self.has_input_scales else None


def expert_scheme(config: Mapping[str, Any], *, activations: str | None = None) -> ExpertScheme:
    """How experts are stored by a `quantization_config` that is for all modules.

    Args:
        config: of config.json, without modules that it leaves out.
        activations: their scheme, where the config implies one without saying so.

    Raises:
        CheckpointError: a field has the wrong type.
        UnsupportedError: a quantization that moequant does not run.
    """
    dialect = find_dialect(config)
    activations = activations or dialect.activations_reader(config)(_EXPERT)
    format = dialect.reader(config, weights_only=activations is not None)(_EXPERT)
    assert format is not None, "the config is for all modules"
    fp8 = get_dialect("fp8")
    if dialect.name == "fp8-ue8m0" and format in fp8.carried:
        # DeepSeek-V3.1 says E8M0 and stores FP32, which holds both.
        dialect = fp8
    return ExpertScheme(dialect=dialect, format=format, activations=activations)
