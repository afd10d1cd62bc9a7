"""Shapes, random weights and routings, and the float32 evaluation that timings are checked by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moequant.kernels.fp8_block.experts import Fp8BlockWeights


@dataclass(frozen=True)
class Shape:
    """Sizes of a MoE layer."""

    experts: int
    hidden: int
    intermediate: int
    topk: int


SHAPES = {
    "qwen3-30b": Shape(128, 2048, 768, 8),
    "qwen3-235b": Shape(128, 4096, 1536, 8),
    "deepseek-v3": Shape(256, 7168, 2048, 8),
    "mixtral-8x7b": Shape(8, 4096, 14336, 2),
    "gpt-oss-120b": Shape(128, 2880, 2880, 4),
}


def random_weights(shape: Shape, device: torch.device, seed: int = 0) -> Fp8BlockWeights:
    """Normal codes and random power-of-two scales; rows that pad gate and up are zero."""
    g = torch.Generator(device).manual_seed(seed)
    E, H, I = shape.experts, shape.hidden, shape.intermediate
    padded = -(-I // 128) * 128

    def codes(rows: int, cols: int) -> Tensor:
        out = torch.empty(E, rows, cols, dtype=torch.float8_e4m3fn, device=device)
        some = max((1 << 28) // (rows * cols), 1)
        for part in out.split(some):
            values = torch.randn(part.shape, generator=g, device=device) * 100
            part.copy_(values.clamp(-448, 448))
        return out

    def scales(rows: int, cols: int) -> Tensor:
        shape = (E, -(-rows // 128), -(-cols // 128))
        return torch.exp2(torch.randint(-14, -11, shape, generator=g, device=device).float())

    w13 = codes(2 * padded, H)
    w13.view(torch.uint8)[:, I:padded] = 0
    w13.view(torch.uint8)[:, padded + I :] = 0
    return Fp8BlockWeights(
        w13=w13, w13_scale=scales(2 * padded, H), w2=codes(H, I), w2_scale=scales(H, I)
    )


def uniform_routing(
    tokens: int, shape: Shape, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    """Distinct experts a token, uniform; softmax-like float32 weights."""
    g = torch.Generator(device).manual_seed(seed)
    score = torch.rand(tokens, shape.experts, generator=g, device=device)
    ids = score.topk(shape.topk, dim=1).indices.int().contiguous()
    weights = torch.rand(tokens, shape.topk, generator=g, device=device) + 0.1
    return ids, weights / weights.sum(1, keepdim=True)


def quantize_dequantize(x: Tensor) -> Tensor:
    """FP8 in groups of 128 and back, float32 [R, C]."""
    R, C = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -C % 128)).reshape(R, -1, 128)
    amax = padded.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / 448)
    q = (padded / scale).to(torch.float8_e4m3fn).float() * scale
    return q.reshape(R, -1)[:, :C]


def dequantize(qdata: Tensor, scale: Tensor) -> Tensor:
    """One expert's weight, float32."""
    s = scale.repeat_interleave(128, 0)[: qdata.shape[0]].repeat_interleave(128, 1)
    return qdata.float() * s[:, : qdata.shape[1]]


def evaluate(weights: Fp8BlockWeights, hidden: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
    """float32 evaluation with the same quantization in front of either GEMM."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x, out = quantize_dequantize(hidden), torch.zeros(hidden.shape, device=hidden.device)
    Ip, I = weights.intermediate, weights.w2.shape[2]
    for e in ids[ids >= 0].unique().tolist():
        token, t = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ dequantize(weights.w13[e], weights.w13_scale[e]).T).split(Ip, 1)
        act = quantize_dequantize(torch.nn.functional.silu(gate) * up)[:, :I]
        y = act @ dequantize(weights.w2[e], weights.w2_scale[e]).T
        out.index_put_((token,), y * topk_weights[token, t, None].float(), accumulate=True)
    return out
