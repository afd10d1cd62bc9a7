"""Dialects: the tensor names, encodings and `quantization_config` that engines expect.

A new dialect is one file here, its formats in schemes.py and one line in REGISTRY, which tests and
the command line read. What engines make of it is in `moequant.compatibility`; CONTRIBUTING.md lists
all files.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING

from moequant.dialects.base import UNQUANTIZED, Dialect
from moequant.dialects.compressed_tensors import CompressedTensors
from moequant.dialects.config_fields import as_mapping
from moequant.dialects.deepseek_v4 import DeepseekV4
from moequant.dialects.fp8 import Fp8
from moequant.dialects.fp8_ue8m0 import Fp8Ue8m0
from moequant.dialects.gpt_oss import GptOss
from moequant.dialects.modelopt import ModelOpt
from moequant.dialects.moequant import Moequant
from moequant.dialects.w4afp8 import W4aFp8
from moequant.errors import CheckpointError, UnsupportedError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable

REGISTRY: dict[str, Dialect] = {
    d.name: d
    for d in (
        Fp8(),
        CompressedTensors(),
        GptOss(),
        ModelOpt(),
        Fp8Ue8m0(),
        DeepseekV4(),
        W4aFp8(),
        Moequant(),
    )
}
"""By name. The default dialect of a format is the first that supports it."""


def get_dialect(name: str) -> Dialect:
    """The dialect called `name`.

    Raises:
        UnsupportedError: there is no such dialect; the message lists all.
    """
    if name not in REGISTRY:
        raise UnsupportedError(unknown_name("dialect", name, REGISTRY))
    return REGISTRY[name]


def default_dialect(format: str) -> str:
    """Name of the dialect in which most engines load the format called `format`.

    Raises:
        UnsupportedError: no dialect supports it.
    """
    for dialect in REGISTRY.values():
        if format in dialect.carried:
            return dialect.name
    raise UnsupportedError(f"no dialect supports the format {format!r}")


def find_dialect(quantization_config: object, names: Iterable[str] = ()) -> Dialect:
    """The dialect of a checkpoint, from the `quantization_config` of its config.json.

    Args:
        quantization_config: of config.json.
        names: of its tensors, which decide where several dialects have such configs; without
            them, it is the first.

    Raises:
        CheckpointError: `quantization_config` is not an object.
        UnsupportedError: an unknown `quant_method`.
    """
    if quantization_config is None:
        raise CheckpointError(
            "no quantization_config, so this is not a converted checkpoint; convert it first: "
            "moequant convert SOURCE OUTPUT --format NAME"
        )
    config = as_mapping(quantization_config, "quantization_config")
    claiming = [dialect for dialect in REGISTRY.values() if dialect.claims(config)]
    if len(claiming) > 1:
        leaves = {name.rpartition(".")[2] for name in names}
        claiming = [d for d in claiming if leaves & d.telling_suffixes] + claiming
    if claiming:
        return claiming[0]
    raise UnsupportedError(
        f"config.json: quantization_config.quant_method is {show(config.get('quant_method'))}; "
        f"moequant reads {', '.join(REGISTRY)}. Take the unquantized release of this model, or one "
        "in one of these dialects. If its weights are not quantized, remove the entry"
    )


__all__ = [
    "REGISTRY",
    "UNQUANTIZED",
    "Dialect",
    "default_dialect",
    "find_dialect",
    "get_dialect",
]
