"""vLLM's configs of quantized checkpoints, with routed experts taken out of them.

Each class is vLLM's own, so linear layers, attention, KV caches and shared experts are what they
are without the plug-in, and so are the names that models ask a config for. Classes stand here by
name because vLLM pickles configs for its workers.

Which layers a checkpoint leaves unquantized is vLLM's decision, by vLLM's functions: the loader
follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMxFp8Config,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from moequant.dialects import find_dialect, get_dialect
from moequant.errors import UnsupportedError
from moequant.integrations.vllm.method import MoequantMoEMethod
from moequant.integrations.vllm.name import NAME, WITHOUT
from moequant.integrations.vllm.options import read_options
from moequant.integrations.vllm.scheme import expert_scheme
from moequant.integrations.vllm.settings import (
    check_served,
    check_settings,
    warn_of_variables,
)
from moequant.integrations.vllm.versions import name_matching, projections
from moequant.runtime.activations import MXFP8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.integrations.vllm.scheme import ExpertScheme

logger = init_logger("vllm.moequant")

_GPT_OSS = "gpt_oss"
_WITH_OWN_CONFIG = ("deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text")
_WITH_OWN_NVFP4 = ("muse_spark", "muse_spark_text", "flint")
"""Models whose experts in NVFP4 vLLM 0.33.0 runs without asking the config for a method.

Of flint that is so on one GPU of SM100 alone; it is refused everywhere.
"""


class _OwnExperts:
    """Goes before a config class of vLLM.

    Attributes:
        stated: `quantization_config` as the checkpoint has it.
    """

    stated: Mapping[str, Any]

    @classmethod
    def check_model_type(cls, model_type: object) -> None:
        """Check that vLLM reads the config of a model of this `model_type` by the class here.

        Raises:
            UnsupportedError: vLLM has a class for that model alone.
        """
        if model_type in _WITH_OWN_CONFIG:
            raise UnsupportedError(
                f"--quantization {NAME} does not serve {model_type}, whose layers have a config "
                f"of their own in vLLM; start without --quantization {NAME}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """As vLLM's, of the same dict."""
        made = super().from_config(config)  # type: ignore[misc]
        made.stated = dict(config)
        return made

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of vLLM's own config, unless the layer holds quantized routed experts.

        Raises:
            UnsupportedError: these experts, or vLLM's settings, are not served.
            CheckpointError: config.json is damaged.
        """
        vllm_config = get_current_vllm_config()
        if not isinstance(layer, RoutedExperts):
            # Some models make experts of their own where settings say so, and ask for no method.
            check_settings(vllm_config)
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        scheme = self._scheme(layer, prefix)
        if scheme is None:
            logger.info_once(
                "the checkpoint keeps routed experts of some layers unquantized: vLLM runs those"
            )
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        options = read_options(vllm_config.additional_config)
        check_served(prefix, layer, vllm_config, activations=options.activations)
        warn_of_variables()
        return MoequantMoEMethod(
            prefix,
            layer.moe_config,
            scheme=scheme,
            options=options,
            dummy=vllm_config.load_config.load_format == "dummy",
        )

    def _scheme(self, layer: Any, prefix: str) -> ExpertScheme | None:
        """How the layer's experts are stored; None where they are not quantized."""
        raise NotImplementedError


class Fp8WithOwnExperts(_OwnExperts, Fp8Config):  # type: ignore[misc]
    """FP8 blocks as DeepSeek-V3 and Qwen3 were released, and MXFP4 beside them."""

    @property
    def store_dtype(self) -> None:
        """None, whatever is set: by "mxfp4", Ling's code in vLLM renames the experts' scales.

        It renames them to what vLLM's own method for MXFP4 calls them.
        """

    @store_dtype.setter
    def store_dtype(self, value: str | None) -> None:
        pass

    def _scheme(self, layer: Any, prefix: str) -> ExpertScheme | None:
        if is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            **name_matching(self),
        ):
            return None
        return expert_scheme(_for_all_modules(self.stated))


class CompressedTensorsWithOwnExperts(_OwnExperts, CompressedTensorsConfig):  # type: ignore[misc]
    """What llm-compressor and moequant write, a scheme for each group of layers."""

    def _scheme(self, layer: Any, prefix: str) -> ExpertScheme | None:
        self._add_fused_moe_to_target_scheme_map()
        # Expert 0 stands for all, as in vLLM's own method.
        found = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in projections(layer)]
        if any(scheme != found[0] for scheme in found):
            raise UnsupportedError(
                f"{prefix}: gate, up and down have different schemes in quantization_config; "
                "convert all three by one rule"
            )
        if found[0] is None:
            return None
        group = {
            "targets": ["Linear"],
            "format": found[0]["format"],
            "weights": _arguments(found[0]["weights"]),
            "input_activations": _arguments(found[0]["input_activations"]),
        }
        kept = _for_all_modules(self.stated)
        return expert_scheme({**kept, "config_groups": {"of the experts": group}})


class NvFp4WithOwnExperts(_OwnExperts, ModelOptNvFp4Config):  # type: ignore[misc]
    """NVFP4 as Model-Optimizer writes it."""

    @classmethod
    def check_model_type(cls, model_type: object) -> None:
        """As _OwnExperts."""
        super().check_model_type(model_type)
        if model_type in _WITH_OWN_NVFP4:
            raise UnsupportedError(
                f"--quantization {NAME} does not serve {model_type} in NVFP4, for which vLLM has "
                f"experts of its own; start without --quantization {NAME}"
            )

    def _scheme(self, layer: Any, prefix: str) -> ExpertScheme | None:
        if self.is_layer_excluded(prefix):
            return None
        return expert_scheme(_for_all_modules(self.stated))


class MxFp8WithOwnExperts(_OwnExperts, ModelOptMxFp8Config):  # type: ignore[misc]
    """MXFP8 as Model-Optimizer writes it, with activations in MXFP8."""

    def _scheme(self, layer: Any, prefix: str) -> ExpertScheme | None:
        if self.is_layer_excluded(prefix):
            return None
        return expert_scheme(_for_all_modules(self.stated), activations=MXFP8)


class GptOssWithOwnExperts(_OwnExperts, GptOssMxfp4Config):  # type: ignore[misc]
    """gpt-oss as it was released: vLLM takes the experts of every layer for MXFP4."""

    @classmethod
    def check_model_type(cls, model_type: object) -> None:
        """As _OwnExperts: vLLM takes such a config for gpt-oss alone."""
        if model_type != _GPT_OSS:
            raise UnsupportedError(
                f"the dialect gpt-oss of a {model_type} model: --quantization {NAME} takes it for "
                f"{_GPT_OSS} only; convert the model into the dialect compressed-tensors"
            )

    def _scheme(self, layer: Any, prefix: str) -> ExpertScheme | None:
        return expert_scheme({"quant_method": get_dialect("gpt-oss").methods[0]})


_BY_DIALECT: dict[str, type[_OwnExperts]] = {
    "fp8": Fp8WithOwnExperts,
    "compressed-tensors": CompressedTensorsWithOwnExperts,
    "gpt-oss": GptOssWithOwnExperts,
    "fp8-ue8m0": Fp8WithOwnExperts,
}
_OF_MODEL_OPTIMIZER = (NvFp4WithOwnExperts, MxFp8WithOwnExperts)
_BY_VLLM = "gpt_oss_mxfp4"
"""As which vLLM rewrites the `quant_method` of gpt-oss."""
_KEPT = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Fields of all dialects that name modules which are not quantized."""


def checkpoint_class(config: Mapping[str, Any]) -> type[_OwnExperts]:
    """The class for a checkpoint's `quantization_config`.

    Raises:
        UnsupportedError: there is none.
    """
    flat = _flat(config)
    if flat.get("quant_method") == _BY_VLLM:
        return GptOssWithOwnExperts
    dialect = _dialect_of(flat)
    if dialect in _BY_DIALECT:
        return _BY_DIALECT[dialect]
    for candidate in _OF_MODEL_OPTIMIZER if dialect == "modelopt" else ():
        if candidate.override_quantization_method(flat, None):
            return candidate
    methods = dict.fromkeys(method for name in _BY_DIALECT for method in get_dialect(name).methods)
    raise UnsupportedError(
        f"quantization_config has quant_method {flat.get('quant_method')!r} and quant_algo "
        f"{flat.get('quant_algo')!r}, but --quantization {NAME} serves the quant_method "
        f"{', '.join(methods)}, and modelopt with the quant_algo NVFP4, W4A16_NVFP4 or MXFP8; "
        "convert the model: moequant convert SOURCE OUTPUT --format NAME --dialect NAME, "
        f"{WITHOUT}"
    )


def _dialect_of(config: Mapping[str, Any]) -> str | None:
    """Name of the dialect of a `quantization_config`; None for another tool's."""
    try:
        return find_dialect(config).name
    except UnsupportedError:
        return None


def _for_all_modules(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` without the modules it leaves out, of which vLLM has decided."""
    return {key: value for key, value in _flat(config).items() if key not in _KEPT}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config`; of hf_quant_config.json, whose fields are one level down."""
    inner = config.get("quantization")
    if not isinstance(inner, dict):
        return dict(config)
    return {"quant_method": "modelopt", **config, **inner}


def _arguments(arguments: Any) -> dict[str, Any] | None:
    """Quantization arguments of compressed-tensors as config.json has them."""
    if arguments is None:
        return None
    found: dict[str, Any] = arguments.model_dump(mode="json")
    return found
