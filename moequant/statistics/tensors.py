"""Names, dtypes and shapes of the tensors in a file of statistics.

Of every layer L with experts:

    layers.L.tokens                          I64 [E]        tokens that each expert saw
    layers.L.INPUT.amax                      F32 [E]        largest magnitude
    layers.L.INPUT.mean_square               F32 [E, K]     of each channel, over its tokens
    layers.L.INPUT.pooled_mean_square        F32 [K]
    layers.L.INPUT.second_moment             F32 [E, K, K]  mean of x xT; only with Hessians
    layers.L.hidden.pooled_second_moment     F32 [H, H]     only with Hessians

INPUT is `hidden`, which gate and up multiply (K = H), or `intermediate`, which down multiplies
(K = I). Expert values are as measured, 0 for an expert without tokens; readers shrink them. The
pooled second moment of intermediates is diagonal: its pooled mean square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.statistics.inputs import HIDDEN, INPUTS, INTERMEDIATE

if TYPE_CHECKING:
    from moequant.statistics.record import StatisticsRecord

TensorSpec = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype and shape."""


def layer_specs(record: StatisticsRecord, layer: int) -> list[TensorSpec]:
    """The tensors of a layer, without second moments of experts and layer."""
    E = record.experts
    specs: list[TensorSpec] = [(f"layers.{layer}.tokens", "I64", (E,))]
    for name in INPUTS:
        K, prefix = record.channels(name), f"layers.{layer}.{name}"
        specs += [
            (f"{prefix}.amax", "F32", (E,)),
            (f"{prefix}.mean_square", "F32", (E, K)),
            (f"{prefix}.pooled_mean_square", "F32", (K,)),
        ]
    return specs


def moment_specs(record: StatisticsRecord, layer: int) -> list[TensorSpec]:
    """The second moments of a layer; none without Hessians."""
    if not record.hessian:
        return []
    H, I = record.channels(HIDDEN), record.channels(INTERMEDIATE)
    return [
        (second_moment(layer, HIDDEN), "F32", (record.experts, H, H)),
        (pooled_second_moment(layer), "F32", (H, H)),
        (second_moment(layer, INTERMEDIATE), "F32", (record.experts, I, I)),
    ]


def second_moment(layer: int, name: str) -> str:
    """The tensor with the second moments of a layer's experts, of the input `name`."""
    return f"layers.{layer}.{name}.second_moment"


def pooled_second_moment(layer: int) -> str:
    """The tensor with the second moments of a layer's hidden states."""
    return f"layers.{layer}.{HIDDEN}.pooled_second_moment"


def all_specs(record: StatisticsRecord) -> list[TensorSpec]:
    """Every tensor of the file."""
    found = []
    for layer in record.layers:
        found += [*layer_specs(record, layer), *moment_specs(record, layer)]
    return found
