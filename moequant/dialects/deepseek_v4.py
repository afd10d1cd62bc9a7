"""DeepSeek-V4 as released: FP8 blocks, with routed experts in MXFP4; read-only.

Its `quantization_config` is that of FP8 blocks. `expert_dtype`, in it or at the top of config.json,
is "fp4" or "fp8". Every scale is E8M0 and called `scale`, which distinguishes it from the dialect
fp8; codes of MXFP4 are I8.

Source: formats as vLLM 0.33, `quantization/mxfp4.py`, and transformers 5.23,
`integrations/finegrained_fp8.py`, read them.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.names import KeptModules, is_expert
from moequant.dialects.schemes import DEEPSEEK_V4
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXPERT_DTYPE = "expert_dtype"
"""The field for the experts' format, at the top of config.json or in `quantization_config`."""
_FORMATS = {name: format for format, scheme in DEEPSEEK_V4.items() for name in scheme.names}


class DeepseekV4(Dialect):
    """`quant_method: fp8` with an `expert_dtype`; the module's docstring has the names."""

    name = "deepseek-v4"
    summary = "DeepSeek-V4's FP8 and MXFP4; read-only"
    methods = ("fp8",)
    schemes = DEEPSEEK_V4
    config_keys = (EXPERT_DTYPE,)

    def complete(
        self,
        quantization_config: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        read: Callable[[str], Mapping[str, Any] | None],
    ) -> Mapping[str, Any] | None:
        """As Dialect; `expert_dtype` may stand at the top of config.json."""
        found = quantization_config
        if found is None or EXPERT_DTYPE in found or EXPERT_DTYPE not in config:
            return found
        return {**found, EXPERT_DTYPE: config[EXPERT_DTYPE]}

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        return (
            super().claims(quantization_config)
            and quantization_config.get(EXPERT_DTYPE) is not None
        )

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        kept = KeptModules(config, "modules_to_not_convert")
        experts = config.get(EXPERT_DTYPE)
        problem = None
        if not isinstance(experts, str) or experts not in _FORMATS:
            problem = f"{EXPERT_DTYPE} is {show(experts)}, but moequant reads only fp4 and fp8"
        elif config.get("weight_block_size") != [128, 128]:
            found = show(config.get("weight_block_size"))
            problem = f"{_WHERE}.weight_block_size is {found}, but moequant reads only [128, 128]"

        def format_of(module: str) -> str | None:
            if module in kept:
                return None
            if problem is not None:
                raise UnsupportedError(f"{module}: {problem}")
            return _FORMATS[str(experts)] if is_expert(module) else "fp8_block"

        return format_of
