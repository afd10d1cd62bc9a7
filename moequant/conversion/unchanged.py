"""Quantized weights of a source that no rule of the recipe names: which of them stay unchanged.

They are copied bit for bit where the output is in the source's dialect and `quantization_config`
describes them as they are stored: an engine that loads them from the source then loads them from
the output. In another dialect they are dequantized to BF16, which every engine loads beside any
format. A rule that gives them a format of that dialect keeps them quantized, without an error if it
is the format they have.

| stored | stays in the same dialect | because |
|---|---|---|
| FP8 blocks, FP32 scales, `fp8` | yes | as DeepSeek-V3 and Qwen3 FP8 were released |
| FP8 blocks, E8M0 scales, `fp8` | no | ours are FP32, and `scale_fmt` speaks of all at once |
| with quantized activations unlike our own | no | a config group would have to say so |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.storage.headers import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moequant.dialects import Dialect
    from moequant.weights.encoded import EncodedInfo
    from moequant.weights.source_model import SourceModel


def unchanged_weights(
    left: Mapping[str, EncodedInfo], source: SourceModel, dialect: Dialect
) -> dict[str, EncodedInfo]:
    """The quantized weights that are copied bit for bit, by name.

    Args:
        left: the quantized weights of `source` that no rule names, by name.
        source: what they are in.
        dialect: what the output is in.
    """
    if dialect is not source.dialect:
        return {}
    assert source.quantization_config is not None, "its weights are quantized"
    format_of = dialect.reader(source.quantization_config)
    return {name: info for name, info in left.items() if _is_ours(info, dialect, format_of)}


def _is_ours(info: EncodedInfo, dialect: Dialect, format_of: Callable[[str], str | None]) -> bool:
    """Whether the dialect would write the same tensors, and describe the same computation."""
    try:
        described = format_of(info.module)
    except UnsupportedError:
        return False
    if described != info.format or info.format not in dialect.carried:
        return False
    written = dialect.encoding(info.format).specs(info.module, info.shape)
    stored = dict(zip(info.places, info.parts, strict=True))
    return written.keys() == stored.keys() and all(
        stored[name].dtype == dtype_name(spec.dtype) for name, spec in written.items()
    )
