"""A Qwen3-MoE checkpoint with random weights, small enough for a demonstration.

Files, tensor names and config keys are those of released models; keys that are not given have the
defaults of transformers. The weights are normally distributed, with a few outlier channels as real
weights have, because outliers are what makes low precision hard.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from moequant.storage.files import CONFIG_FILE, INDEX_FILE
from moequant.storage.headers import dtype_name
from moequant.storage.writer import ShardWriter, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

LAYERS = 2
EXPERTS = 16
TOP_K = 4
HIDDEN = 512
INTERMEDIATE = 256
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64
VOCABULARY = 1024

STD = 0.02
OUTLIER_CHANNELS = 4
OUTLIER_GAIN = 4.0
SHARD_BYTES = 8_000_000

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "bos_token_id": 0,
    "decoder_sparse_step": 1,
    "eos_token_id": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": INTERMEDIATE,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}
GENERATION_CONFIG = {
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": 1,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


def write_demo_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint, about 30 MB in several shards, into `folder`, created if need be.

    Raises:
        MoequantError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(seed))
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        specs = [(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
        writer = ShardWriter(folder / file, *lay_out(specs))
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(t.nbytes for tensors in shards for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, content in (
        (INDEX_FILE, index),
        ("generation_config.json", GENERATION_CONFIG),
        (CONFIG_FILE, CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _shards(seed: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in model order, split into shards as transformers does."""
    shard: dict[str, Tensor] = {}
    for name, tensor in _tensors(torch.Generator().manual_seed(seed)):
        if sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _tensors(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    def normal(rows: int, cols: int, gain: Tensor | float = 1.0) -> Tensor:
        return (torch.randn(rows, cols, generator=generator) * STD * gain).bfloat16()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", normal(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        # Outliers are channels of the residual stream: the same for all experts of a layer.
        gain = torch.ones(HIDDEN)
        gain[torch.randperm(HIDDEN, generator=generator)[:OUTLIER_CHANNELS]] = OUTLIER_GAIN
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_proj.weight", normal(HEADS * HEAD_DIM, HIDDEN)
        yield f"{attention}.k_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{attention}.v_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{attention}.o_proj.weight", normal(HIDDEN, HEADS * HEAD_DIM)
        yield f"{attention}.q_norm.weight", ones(HEAD_DIM)
        yield f"{attention}.k_norm.weight", ones(HEAD_DIM)
        yield f"{prefix}.mlp.gate.weight", normal(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            module = f"{prefix}.mlp.experts.{expert}"
            yield f"{module}.gate_proj.weight", normal(INTERMEDIATE, HIDDEN, gain)
            yield f"{module}.up_proj.weight", normal(INTERMEDIATE, HIDDEN, gain)
            yield f"{module}.down_proj.weight", normal(HIDDEN, INTERMEDIATE, gain[:, None])
        yield f"{prefix}.input_layernorm.weight", ones(HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", ones(HIDDEN)
    yield "model.norm.weight", ones(HIDDEN)
    yield "lm_head.weight", normal(VOCABULARY, HIDDEN)
