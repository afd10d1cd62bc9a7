"""Sums over what the experts of one layer multiply.

Squares of float32 numbers are exact in float64, and are added in float64, one batch after the other
and in each batch over rows in an order that depends on their number alone. So a layer that is
calibrated again gives the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.statistics import INPUTS, InputSums, LayerSums
from moequant.statistics.inputs import HIDDEN
from moequant.statistics.tensors import pooled_second_moment, second_moment

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.statistics import StatisticsRecord, StatisticsWriter

_ROWS = 1024
"""Rows that are squared at once: their float64 copy is small beside the layer."""


class LayerAccumulator:
    """The sums of one layer.

    Args:
        record: the sizes.
        layer: index of the layer.
        device: where the rows are.
    """

    def __init__(self, record: StatisticsRecord, layer: int, device: torch.device) -> None:
        E = record.experts
        self._layer = layer
        self._top_k = record.top_k
        self._seen = {name: torch.zeros(E, dtype=torch.int64) for name in INPUTS}
        self._amax = {name: torch.zeros(E, device=device) for name in INPUTS}
        self._squares = {
            name: torch.zeros(E, record.channels(name), dtype=torch.float64, device=device)
            for name in INPUTS
        }

    def add(self, name: str, expert: int, rows: Tensor) -> None:
        """Add rows [n, K], on the device, that an expert multiplies."""
        if len(rows) == 0:
            return
        self._seen[name][expert] += len(rows)
        most = torch.maximum(self._amax[name][expert], rows.abs().amax().float())
        self._amax[name][expert] = most
        for first in range(0, len(rows), _ROWS):
            part = rows[first : first + _ROWS]
            self._squares[name][expert] += part.double().square_().sum(0)

    def finish(self) -> LayerSums:
        """The sums.

        Raises:
            UnsupportedError: no product, or only products with a part of the weights, were seen.
        """
        hidden, intermediate = (self._seen[name] for name in INPUTS)
        if not torch.equal(hidden, intermediate) or not hidden.any():
            raise UnsupportedError(
                f"layer {self._layer}: gate and up were seen to multiply {int(hidden.sum())} rows, "
                f"and down {int(intermediate.sum())}, but both must be the tokens of an expert; "
                "transformers' class of this model multiplies in a way that is not known"
            )
        inputs = {
            name: InputSums(square_sum=self._squares[name].cpu(), amax=self._amax[name].cpu())
            for name in INPUTS
        }
        return LayerSums(tokens=hidden, inputs=inputs)


class SecondMoments:
    """The second moments of a layer's experts, streamed to the file of statistics.

    Rows are kept until they take `limit_bytes`. Then, of one expert after the other, the sum in the
    file is read, what its rows add to it is added, and it is written. So memory holds the rows and
    one matrix, whatever the number of experts.

    Args:
        writer: the file.
        layer: index of the layer.
        limit_bytes: of the rows that are kept.
    """

    def __init__(self, writer: StatisticsWriter, layer: int, limit_bytes: int) -> None:
        self._writer = writer
        self._layer = layer
        self._limit_bytes = limit_bytes
        self._rows: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._kept_bytes = 0
        self._begun: set[tuple[str, int]] = set()

    def add(self, name: str, expert: int, rows: Tensor) -> None:
        """Add rows [n, K] that an expert multiplies."""
        if len(rows):
            self._rows[name, expert].append(rows.clone())
            self._kept_bytes += rows.nbytes

    def flush_if_full(self) -> None:
        """Add what is kept to the file, if it is much; to be called between batches."""
        if self._kept_bytes >= self._limit_bytes:
            self._flush()

    def finish(self, tokens: Tensor) -> str:
        """Divide the sums by tokens [E], and pool those of hidden states; returns their digest."""
        self._flush()
        pooled: Tensor | None = None
        for name in INPUTS:
            for expert, count in enumerate(tokens.tolist()):
                total = self._read(name, expert)
                total = (total + total.T) / 2  # a product of two matrices rounds both halves
                if name == HIDDEN:
                    pooled = total.double() if pooled is None else pooled.add_(total)
                self._write(name, expert, total / max(count, 1))
        assert pooled is not None, "a layer has experts"
        mean = (pooled / max(int(tokens.sum()), 1)).to(torch.float32)
        self._writer.write_rows(pooled_second_moment(self._layer), 0, mean)
        return self._writer.digest_moments(self._layer)

    def _flush(self) -> None:
        for name, expert in sorted(self._rows):
            rows = torch.cat(self._rows.pop((name, expert))).float()
            product = (rows.T @ rows).cpu()
            if (name, expert) in self._begun:
                product += self._read(name, expert)
            self._begun.add((name, expert))
            self._write(name, expert, product)
        self._kept_bytes = 0

    def _read(self, name: str, expert: int) -> Tensor:
        """The sum so far; the file may hold that of a run that was killed."""
        tensor = second_moment(self._layer, name)
        total = self._writer.read_rows(tensor, slice(expert, expert + 1))[0]
        return total if (name, expert) in self._begun else total.zero_()

    def _write(self, name: str, expert: int, total: Tensor) -> None:
        self._writer.write_rows(second_moment(self._layer, name), expert, total[None])
