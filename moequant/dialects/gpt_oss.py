"""MXFP4 experts as gpt-oss was released; vLLM, SGLang and transformers load it only for gpt-oss.

The experts of a layer are stacked: `gate_up_proj_blocks` [E, 2I, H/32, 16] and
`gate_up_proj_scales` [E, 2I, H/32] with interleaved rows of gate and up, and likewise `down_proj`.
Biases do not change. All other weights keep their source dtype.

`modules_to_not_convert` is exactly the released checkpoints', because it is the only list that all
three engines are known to load. They never treat anything but experts as MXFP4.

Sources: openai/gpt-oss-20b, config.json; vLLM 0.33 and SGLang 0.5.23, `quantization/mxfp4.py` and
`models/gpt_oss.py`; transformers 5.24 `integrations/mxfp4.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.names import KeptModules, is_expert
from moequant.dialects.schemes import GPT_OSS
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_FORMAT = "mxfp4"
_KEPT_BY_RELEASES = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


class GptOss(Dialect):
    """`quant_method: mxfp4`; the module's docstring has the reasons."""

    name = "gpt-oss"
    summary = "vLLM, SGLang and transformers, only for gpt-oss; how its MXFP4 was released"
    schemes = GPT_OSS
    methods = ("mxfp4",)
    stacks = True

    def check(
        self, module: str, format: str, shape: Sequence[int], *, rows_follow: bool = False
    ) -> None:
        """As Dialect; only routed experts are supported."""
        super().check(module, format, shape, rows_follow=rows_follow)
        if format in self.encodings and not is_expert(module):
            raise UnsupportedError(
                f"{module}: the dialect {self.name} supports only routed experts; keep this module "
                'in its source dtype (format = "keep" in a recipe), or choose the dialect moequant'
            )

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [*_KEPT_BY_RELEASES, *blocks],
        }

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        kept = KeptModules(config, "modules_to_not_convert")
        return lambda module: _FORMAT if is_expert(module) and module not in kept else None
