"""Small layers of experts, calls of them, and their evaluation in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.formats.elements import decode_e2m1, unpack_nibbles
from moequant.layouts.swizzle_128x4 import unswizzle
from moequant.runtime import ExpertWeights
from moequant.verification.reference import evaluate_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Experts, the BF16 weights they were made from, and a call of them."""

    weights: ExpertWeights
    source: dict[str, Tensor]
    hidden: Tensor
    ids: Tensor
    topk_weights: Tensor

    @property
    def call(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.topk_weights, self.ids

    def evaluate(
        self,
        hidden: Tensor | None = None,
        ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Output and bound, float64, for a result in `dtype`, with what `dequantize` makes of the
        weights.
        """
        decoded = {name: dequantize(q).double() for name, q in self.weights.projections().items()}
        output, bound = evaluate_layer(
            self.hidden if hidden is None else hidden,
            self.ids if ids is None else ids,
            self.topk_weights if topk_weights is None else topk_weights,
            lambda projection, e: decoded[projection][e],
        )
        if dtype != torch.float32:  # which the sum is already in
            info = torch.finfo(dtype)
            bound += info.eps / 2 * (output.abs() + bound).clamp(min=info.tiny)
        return output, bound


class Layers:
    """Makes layers; the same arguments make the same layer."""

    def make(
        self,
        format: str = "fp8_block",
        *,
        E: int = 6,
        H: int = 256,
        I: int = 128,
        M: int = 13,
        T: int = 3,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Layer:
        g = torch.Generator().manual_seed(seed)
        shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
        source = {
            name: (torch.randn(shape, generator=g) * shape[2] ** -0.5).bfloat16()
            for name, shape in shapes.items()
        }
        fmt = get_format(format)
        gate, up = fmt.quantize_fused([source["gate"], source["up"]], names=["gate", "up"])
        scores = torch.rand(M, E, generator=g)
        topk_weights, ids = scores.topk(T)
        return Layer(
            weights=ExpertWeights(gate=gate, up=up, down=fmt.quantize(source["down"])),
            source=source,
            hidden=torch.randn(M, H, generator=g).to(dtype),
            ids=ids,
            topk_weights=topk_weights / topk_weights.sum(1, keepdim=True),
        )


@pytest.fixture(params=list(CONVERTIBLE))
def every_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def layers() -> Layers:
    return Layers()


@pytest.fixture(scope="session")
def inputs() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """inputs((E, H, I, T), M): a call on the GPU; equal arguments give the same."""
    return _inputs


def _inputs(
    shape: tuple[int, int, int, int],
    M: int,
    kind: str = "uniform",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    E, H, _, T = shape
    g = torch.Generator("cuda").manual_seed(M)
    hidden = torch.randn(M, H, generator=g, device="cuda").to(dtype)
    score = torch.rand(M, E, generator=g, device="cuda")
    if kind == "skewed":  # the first experts take most tokens
        score = score * torch.arange(E, 0, -1, device="cuda") ** 2
    ids = score.topk(T).indices
    if kind == "holes":
        ids[torch.rand(M, T, generator=g, device="cuda") < 0.4] = -1
    if kind == "one expert":
        ids[:] = -1
        ids[:, T - 1] = E - 1
    if kind == "nowhere":
        ids[:] = -1
    router = torch.rand(M, T, generator=g, device="cuda") + 0.1
    return hidden, router / router.sum(1, keepdim=True), ids.int()


@pytest.fixture
def fp4_on_cpu(monkeypatch):
    """fp4_on_cpu(): from then on cutlass_fp4 and its batches run, with GEMMs of torch."""

    def patch():
        from moequant.kernels.cutlass import sm100_fp4_fused as fused
        from moequant.runtime.backends.cutlass_fp4 import CutlassFp4

        monkeypatch.setattr(CutlassFp4, "supports", lambda self, workload: None)
        monkeypatch.setattr(fused, "Fp4GroupedGemm", TorchFp4Gemm)
        monkeypatch.setattr(fused, "stream_of", lambda device: 0)

    return patch


class TorchFp4Gemm:
    """Stands for `Fp4GroupedGemm`: the same arguments, float32 sums."""

    def __init__(self, variant, *, x, x_scale, x_factor, w, w_scale, alpha, tiles, tile_count, out):
        self.group, self.dtype, self.out = variant.group, w_scale.dtype, out
        self.x, self.x_scale, self.x_factor = x, x_scale.view(torch.uint8), x_factor
        rows, K = w.shape[1], 2 * w.shape[2]
        self.w = self.numbers(w, unswizzle(w_scale, rows, K // self.group))
        if alpha is not None:
            self.w *= alpha.repeat_interleave(rows // alpha.shape[1], 1)[..., None]
        self.tiles, self.tile_count = tiles, tile_count

    def numbers(self, codes, scale):
        scale = scale.view(self.dtype).float().repeat_interleave(self.group, -1)
        return decode_e2m1(unpack_nibbles(codes)) * scale

    def __call__(self, stream):
        columns = 2 * self.x.shape[1] // self.group
        tiles = self.tiles[: self.tile_count.item()].tolist()
        for index, (expert, first, rows, _) in enumerate(tiles):
            at = slice(first, first + rows)
            # What rows that the tile lacks have was not written.
            scale = self.x_scale[128 * index : 128 * index + 128]
            scale = unswizzle(zero_padding(scale, rows, columns), rows, columns)
            x = self.numbers(self.x[at], scale)
            if self.x_factor is not None:
                x *= self.x_factor[at, None]
            self.out[at] = (x @ self.w[expert].T).bfloat16()


def zero_padding(scale, rows, columns):
    """Swizzled scales of a tile of rows, with zeros in the rows and columns of padding."""
    r, c = torch.arange(128)[:, None], torch.arange(scale.shape[1])
    at = c // 4 * 512 + r % 32 * 16 + r // 32 * 4 + c % 4
    flat = scale.flatten().clone()
    flat[at[(r >= rows) | (c >= columns)]] = 0
    return flat.view(scale.shape)
