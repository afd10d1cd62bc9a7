"""DeepSeek-V4 as released: FP8 blocks, with routed experts in MXFP4 or in FP8 blocks, too.

`quantization_config` is that of FP8 blocks with `scale_fmt: ue8m0`. `expert_dtype`, "fp4" or "fp8",
says the format of routed experts: at the top of config.json in releases of V4, in
`quantization_config` in those of V4.1. Every scale is called `scale`, which distinguishes the
dialect from fp8-ue8m0; codes of MXFP4 are I8.

Engines read it of DeepSeek-V4 alone, by rules of that model: its modules have other names in each
of them, and a list of kept modules is no help. So everything has to be as in the release.

Decisions, each with the failure it prevents:

* Every linear layer of attention, shared experts and routed experts is quantized: SGLang 0.5.23
  does not rename `modules_to_not_convert` as it does modules, and takes all of them for FP8.
* `expert_dtype` at the top, where vLLM 0.33 looks, and takes experts for MXFP4 without it; and in
  `quantization_config`, where moequant looks.
* No `routed_experts_quant_method`: with it, SGLang leaves out what else it does for a V4, which is
  to ignore `topk_group`. It sees MXFP4 by the dtype of the codes.
* Scales in E8M0, as vLLM's parameters are beside MXFP4 experts. Those of FP8 experts in FP32: vLLM
  takes the bytes of E8M0 scales of experts for numbers.

Sources: vLLM 0.33 `models/deepseek_v4/quant_config.py` and `nvidia/model.py`; SGLang 0.5.23
`configs/model_config.py`, `configs/deepseek_v4.py` and `models/deepseek_v4.py`; transformers 5.24
`integrations/finegrained_fp8.py` and `conversion_mapping.py`.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.names import KeptModules, format_by_role, is_expert
from moequant.dialects.schemes import DEEPSEEK_V4
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

EXPERT_DTYPE = "expert_dtype"
"""The field for the experts' format, at the top of config.json or in `quantization_config`."""
_EXPERT_DTYPES = {format: str(scheme.names[0]) for format, scheme in DEEPSEEK_V4.items()}
_FORMATS = {name: format for format, name in _EXPERT_DTYPES.items()}
_OTHERS = "fp8_block"
"""The format of all linear layers but routed experts."""


class DeepseekV4(Dialect):
    """`quant_method: fp8` with an `expert_dtype`; the module's docstring has the names."""

    name = "deepseek-v4"
    summary = (
        "vLLM, SGLang and transformers, only for DeepSeek-V4, whole models; how it was released"
    )
    methods = ("fp8",)
    schemes = DEEPSEEK_V4
    config_keys = (EXPERT_DTYPE,)
    architectures = ("deepseek_v4",)
    quantizes_all = True

    def check(
        self, module: str, format: str, shape: Sequence[int], *, rows_follow: bool = False
    ) -> None:
        """As Dialect; MXFP4 is for routed experts only."""
        super().check(module, format, shape, rows_follow=rows_follow)
        if format in self.encodings and format != _OTHERS and not is_expert(module):
            raise UnsupportedError(
                f"{module}: the dialect {self.name} holds {format} only for routed experts; give "
                f"this module {_OTHERS} in a recipe"
            )

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        experts: dict[str, str] = {}
        for module, format in formats.items():
            if is_expert(module):
                experts.setdefault(format, module)
        if len(experts) > 1:
            examples = " and ".join(f"{module} in {format}" for format, module in experts.items())
            raise UnsupportedError(
                f"{examples}, but the dialect {self.name} says one format of all routed experts, "
                "also of multi-token prediction; give them one in a recipe, or bf16 to those of "
                'match = "mtp.*"'
            )
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
            EXPERT_DTYPE: _EXPERT_DTYPES[next(iter(experts), _OTHERS)],
            "modules_to_not_convert": sorted(blocks + others),
        }

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
        """As Dialect; in releases no list says which modules are kept."""
        kept = KeptModules(config, "modules_to_not_convert")
        stated = config.get(EXPERT_DTYPE)
        experts = _FORMATS.get(stated) if isinstance(stated, str) else None
        problem = None
        if experts is None:
            problem = f"{EXPERT_DTYPE} is {show(stated)}, but moequant reads only fp4 and fp8"
        elif config.get("weight_block_size") != [128, 128]:
            found = show(config.get("weight_block_size"))
            problem = f"{_WHERE}.weight_block_size is {found}, but moequant reads only [128, 128]"
        return format_by_role(kept, experts=experts or _OTHERS, others=_OTHERS, problem=problem)
