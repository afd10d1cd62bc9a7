"""What a batch takes in memory while it runs through a layer.

It follows from the layer's linear modules: every one of them has an input and a result, of which a
class keeps some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from moequant.integrations.layerwise import LayerwiseModel
    from moequant.models.moe_config import MoeConfig

_ONEDNN_BYTES = 256 << 20
"""oneDNN, which multiplies BF16 on a CPU, compiles a kernel for each number of rows, and keeps
1024 of them: about 100 MB were measured."""
_RESIDUAL_COPIES = 12
"""Hidden states of a batch that exist at once: read, embedded, normalised, added, returned."""
_EXPERT_COPIES = 3
"""Of the rows of one expert: gathered, as magnitudes, weighted."""


def embedding_bytes(model: LayerwiseModel, batches: Sequence[Tensor]) -> int:
    """Upper bound of the embedding with the batch that it is looked up for."""
    tokens = max(batch.numel() for batch in batches)
    hidden = model.source.model.moe.hidden
    return 2 * model.embedding_bytes + 2 * tokens * hidden * model.dtype.itemsize


def batch_bytes(model: LayerwiseModel, batches: Sequence[Tensor], layers: Iterable[int]) -> int:
    """Upper bound of what the largest batch [B, S] takes in `layers`, besides their weights."""
    moe: MoeConfig = model.source.model.moe
    tokens = max(batch.numel() for batch in batches)
    pairs = max(batch.numel() * batch.shape[1] for batch in batches)
    widths = max(_widths(model.layers[index]) for index in layers)
    of_token = (_RESIDUAL_COPIES + _EXPERT_COPIES) * moe.hidden + widths + 6 * moe.intermediate
    scores = model.scores_per_pair * pairs * 4
    return tokens * of_token * max(model.dtype.itemsize, 4) + scores  # norms, softmax: float32


def kernel_bytes(model: LayerwiseModel) -> int:
    """Upper bound of what libraries compile and keep."""
    return _ONEDNN_BYTES if model.dtype.itemsize < 4 and model.device.type == "cpu" else 0


def _widths(layer: nn.Module) -> int:
    """Inputs and results of all linear modules of a layer, in channels."""
    return sum(
        module.in_features + module.out_features
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    )
