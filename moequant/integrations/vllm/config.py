"""MoequantConfig: what vLLM knows as the quantization "moequant".

It holds nothing. vLLM asks it whether it takes a checkpoint, and then for the checkpoint's config,
which is one of vLLM's own with routed experts taken out (`checkpoints.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moequant.errors import UnsupportedError
from moequant.integrations.vllm.name import NAME
from moequant.integrations.vllm.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class MoequantConfig(QuantizationConfig):  # type: ignore[misc]
    """Chosen by `--quantization moequant`; `from_config` returns another class.

    Raises:
        UnsupportedError: when it is made itself, which vLLM does for a checkpoint without
            `quantization_config`.
    """

    def __init__(self) -> None:
        raise UnsupportedError(
            f"--quantization {NAME}, but the checkpoint has no quantization_config in config.json, "
            "and experts are not quantized while loading; convert it first: moequant convert "
            "SOURCE OUTPUT --format NAME"
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: object, user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """Take the checkpoint if the user asks for moequant, and only then.

        Args:
            hf_quant_cfg: `quantization_config` of config.json.
            user_quant: of `--quantization`.
            hf_config: the model's config, of which `model_type` is read.

        Raises:
            UnsupportedError: the user asks for it, and its experts are not served, or not in this
                version of vLLM.
        """
        if user_quant != NAME:
            return None
        if not isinstance(hf_quant_cfg, dict):
            return NAME  # vLLM then makes this class, which says why not
        _checkpoint_class(hf_quant_cfg).check_model_type(getattr(hf_config, "model_type", None))
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """The checkpoint's own config of vLLM, with routed experts taken out.

        Raises:
            UnsupportedError: no class of `checkpoints.py` is for it, or the plug-in is not written
                for this version of vLLM.
        """
        return _checkpoint_class(config).from_config(config)

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """None: vLLM then makes this class where config.json has no quantization."""
        return []

    def get_name(self) -> NoReturn:
        """Not called: there is no instance."""
        raise NotImplementedError

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Not called: there is no instance."""
        raise NotImplementedError

    @classmethod
    def get_min_capability(cls) -> int:
        """Not called: vLLM asks what `from_config` returns."""
        raise NotImplementedError

    def get_quant_method(self, layer: object, prefix: str) -> NoReturn:
        """Not called: there is no instance."""
        raise NotImplementedError


def _checkpoint_class(config: Mapping[str, Any]) -> Any:
    check_version()
    # Not at the head: vLLM imports this module in every process, and those are all of its kernels.
    from moequant.integrations.vllm.checkpoints import checkpoint_class

    return checkpoint_class(config)
