"""A Qwen3-MoE checkpoint of a given size to convert: experts of Qwen3-30B-A3B, and little else.

Its weights are N(0, 0.02) from a few random experts that repeat; what a conversion costs does not
depend on the values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from moequant.storage.disk import explained
from moequant.storage.files import CONFIG_FILE, SINGLE_FILE
from moequant.storage.headers import dtype_name
from moequant.storage.writer import ShardWriter, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

HIDDEN = 2048
INTERMEDIATE = 768
MOST_EXPERTS = 128
"""In a layer, as the model has."""
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2

_VOCABULARY = 256
_DISTINCT = 4
"""Random experts; the others repeat them."""


def write_moe_checkpoint(folder: Path, size_bytes: int) -> int:
    """Write a checkpoint of about `size_bytes` into `folder`, created if need be.

    Returns:
        Bytes of its experts.

    Raises:
        MoequantError: it cannot be written.
    """
    total = max(1, round(size_bytes / EXPERT_BYTES))
    layers = -(-total // MOST_EXPERTS)
    experts = -(-total // layers)
    with explained(folder, "created"):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(layers, experts))
    header, slots = lay_out([(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()])
    writer = ShardWriter(folder / SINGLE_FILE, header, slots)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    with explained(folder, "written"):
        (folder / CONFIG_FILE).write_text(json.dumps(_config(layers, experts), indent=2), "utf-8")
    return layers * experts * EXPERT_BYTES


def _tensors(layers: int, experts: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN)}
    shapes["down"] = (HIDDEN, INTERMEDIATE)
    distinct = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(_DISTINCT)]
    yield "model.embed_tokens.weight", normal(_VOCABULARY, HIDDEN)
    for layer in range(layers):
        module = f"model.layers.{layer}.mlp"
        yield f"{module}.gate.weight", normal(experts, HIDDEN)
        for expert in range(experts):
            for name, weight in distinct[expert % _DISTINCT].items():
                yield f"{module}.experts.{expert}.{name}_proj.weight", weight
    yield "lm_head.weight", normal(_VOCABULARY, HIDDEN)


def _config(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "mlp_only_layers": [],
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": _VOCABULARY,
    }
