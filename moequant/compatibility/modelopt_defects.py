"""What engines do not load of the layouts that Model-Optimizer has.

Read in vLLM 0.33.0 (0.22.1 has no FP8 blocks for experts), `quantization/modelopt.py`, and SGLang
0.5.23, `quantization/modelopt_quant.py`, `quantization/fp8.py` and `configs/model_config.py`:

| scales of | file | vLLM | SGLang |
|---|---|---|---|
| FP8 blocks of experts, alone | any | one scale a matrix | refuses the algorithm |
| FP8 blocks of experts, in a mixture | weight_scale_inv [N/128, K/128] | reads | reads |
| FP8 blocks of other layers | weight_scale [N/128, 1, K/128, 1] | reads | |
| FP8 blocks of other layers | weight_scale_inv [N/128, K/128] | | reads in a mixture |
| MXFP8, alone | weight_scale [N, K/32] | reads | renames and reads |
| MXFP8, in a mixture | weight_scale | reads | |
| MXFP8, in a mixture | weight_scale_inv | | reads |
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from moequant.compatibility.facts import Defect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG, mapping_field
from moequant.formats import get_format
from moequant.formats.base import WHOLE
from moequant.models import ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moequant.compatibility.modules import Module

_SCALE_INV_2D = ("weight_scale_inv", 2)
_SCALE_2D = ("weight_scale", 2)
_SCALE_4D = ("weight_scale", 4)


def modelopt_defects(modules: Sequence[Module], config: Mapping[str, Any]) -> Iterator[Defect]:
    """The defects of a checkpoint in the dialect modelopt.

    Args:
        modules: of `modules_in`.
        config: its quantization_config, completed.

    Raises:
        CheckpointError: a field of the config has the wrong type.
    """
    layers = mapping_field(config, "quantized_layers", QUANTIZATION_CONFIG)
    quantized = [module for module in modules if module.quantized and module.stated is not None]
    experts = [module for module in quantized if module.group == ROUTED_EXPERTS]
    by_row = tuple(module.name for module in experts if _has_row_scales(module))
    if by_row:
        yield Defect(id="row-scales", names=by_row)
    blocks = tuple(module.name for module in experts if _has_blocks(module))
    if blocks and not layers:
        yield Defect(id="blocks-alone", names=blocks)
    if not layers:
        return
    if not any(_is_nvfp4(entry) for entry in layers.values()):
        yield Defect(id="no-nvfp4-layer", names=(next(iter(layers)),))
    for engine in ("vLLM", "SGLang"):
        wrong = tuple(module.name for module in quantized if not _finds_scale(module, engine))
        if wrong:
            yield Defect(id="scale-names", names=wrong, engines=frozenset({engine}))


def _has_row_scales(module: Module) -> bool:
    """Whether it has a scale for each row, where engines have one for all."""
    scale = module.parts.get("weight_scale")
    whole_rows = get_format(str(module.stated)).block[1] == WHOLE
    return whole_rows and scale is not None and prod(scale.shape) > 1


def _has_blocks(module: Module) -> bool:
    """Whether it has a scale for several rows, but not for all."""
    return get_format(str(module.stated)).block[0] not in (1, WHOLE)


def _is_nvfp4(entry: object) -> bool:
    stated = entry.get("quant_algo") if isinstance(entry, dict) else None
    return str(stated).upper() in ("NVFP4", "W4A16_NVFP4")


def _finds_scale(module: Module, engine: str) -> bool:
    """Whether an engine finds the scale of a module of a mixture under the name and shape."""
    if module.stated == "mxfp8":
        name, axes = _SCALE_2D if engine == "vLLM" else _SCALE_INV_2D
    elif _has_blocks(module):
        is_4d = engine == "vLLM" and module.group != ROUTED_EXPERTS
        name, axes = _SCALE_4D if is_4d else _SCALE_INV_2D
    else:
        return True
    scale = module.parts.get(name)
    return scale is not None and len(scale.shape) == axes
