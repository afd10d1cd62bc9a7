"""Values of config.json that are not sizes of experts, but that whoever loads a model reads."""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping


def language_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json about the language model: `text_config`, or all if it has none."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def sections_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """`language_section`, and the top of config.json, where vision models have some values."""
    return (language_section(config), config)


def check_dtype_and_rope(config: Mapping[str, Any]) -> None:
    """Check the types of values without which no engine makes a model.

    Raises:
        CheckpointError: a dtype is none of torch, or the settings of rotary embeddings are no
            object.
    """
    dtype_in(config)
    for section in sections_of(config):
        for key in ("rope_parameters", "rope_scaling"):
            # What is empty counts as not there, as in transformers.
            if section.get(key) and not isinstance(section[key], dict):
                raise _refusal(
                    key, section[key], 'an object, such as {"rope_type": "default"}, or null'
                )


def dtype_in(config: Mapping[str, Any]) -> str | None:
    """What config.json says that the model computes in, of a vision model its language model.

    Raises:
        CheckpointError: it says something else than the name of a dtype of torch.
    """
    # transformers 5 writes `dtype`, and before it wrote `torch_dtype`.
    named = [(key, s.get(key)) for s in sections_of(config) for key in ("dtype", "torch_dtype")]
    for key, stated in named:
        # One for each part of the model, where they differ; that of its top is called "".
        dtype = stated.get("text_config", stated.get("")) if isinstance(stated, dict) else stated
        if dtype is None:
            continue
        # transformers, with which every engine reads config.json, looks the name up in torch.
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise _refusal(key, dtype, 'the name of a dtype of torch, such as "bfloat16"')
        return dtype
    return None


def _refusal(key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: {key} is {show(value)}, but must be {wanted}; take the config.json of the "
        "model's release"
    )
