"""NVFP4 as NVIDIA Model-Optimizer writes it; a source, never an output.

`weight` U8 [N, K/2], `weight_scale` E4M3 [N, K/16] and `weight_scale_2` FP32, which multiplies:
compressed-tensors has its reciprocal. `input_scale` is of activations.

config.json has a `quantization_config`; older releases have hf_quant_config.json alone, whose
`quantization` says the same with `exclude_modules` for `ignore`.

Source: NVIDIA/Model-Optimizer 0.47, `torch/export/convert_hf_config.py`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import SourceDialect
from moequant.dialects.config_fields import as_mapping, names_field, show
from moequant.dialects.encodings import Nvfp4Multiplied
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WHERE = "quantization_config"
_FORMAT = "nvfp4"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


class ModelOpt(SourceDialect):
    """`quant_method: modelopt` with NVFP4 weights; the module's docstring has the names."""

    name = "modelopt"
    summary = "NVIDIA Model-Optimizer's NVFP4; as a source alone"
    foreign = {_FORMAT: Nvfp4Multiplied()}  # noqa: RUF012

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        return quantization_config.get("quant_method") in ("modelopt", "modelopt_fp4")

    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect; a module is kept by its name, that of one it lies in, or a pattern."""
        config = as_mapping(quantization_config, _WHERE)
        kept = names_field(config, "ignore", _WHERE)
        kept = kept + names_field(config, "exclude_modules", _WHERE)
        exact = {name for name in kept if "*" not in name}
        patterns = [name for name in kept if "*" in name]
        problem = _unreadable(config)

        def format_of(module: str) -> str | None:
            parts = module.split(".")
            within = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
            if any(name in exact for name in within):
                return None
            if any(fnmatchcase(module, pattern) for pattern in patterns):
                return None
            if problem is not None:
                raise UnsupportedError(f"{module}: {problem}")
            return _FORMAT

        return format_of


def _unreadable(config: Mapping[str, Any]) -> str | None:
    """Why `config` describes weights other than NVFP4, or None."""
    algorithm = config.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        return (
            f"{_WHERE}.quant_algo is {show(algorithm)}, and of Model-Optimizer moequant reads "
            f"{' and '.join(_ALGORITHMS)}"
        )
    if config.get("group_size") not in (None, 16):
        return f"{_WHERE}.group_size is {show(config['group_size'])}, and NVFP4 has 16"
    return None
