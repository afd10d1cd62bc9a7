"""Qwen3-MoE checkpoints with random weights: a small one to demonstrate, a large one to time.

Files, tensor names and config keys are those of released models; keys that are not given have the
defaults of transformers. The weights are normally distributed, with a few outlier channels as real
weights have, because outliers are what makes low precision hard.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from moequant.storage.disk import explained
from moequant.storage.files import CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE
from moequant.storage.headers import dtype_name
from moequant.storage.writer import ShardWriter, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

LAYERS = 2
EXPERTS = 16
TOP_K = 4
HIDDEN = 512
INTERMEDIATE = 256

STD = 0.02
OUTLIER_CHANNELS = 4
OUTLIER_GAIN = 4.0
SHARD_BYTES = 8_000_000

BENCH_HIDDEN = 2048
BENCH_INTERMEDIATE = 768
BENCH_EXPERTS = 128
"""At most, in a layer; the sizes are those of Qwen3-30B-A3B."""
EXPERT_BYTES = 3 * BENCH_HIDDEN * BENCH_INTERMEDIATE * 2
_DISTINCT = 4
"""Experts with weights of their own in a checkpoint to time; what it costs is the same."""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "bos_token_id": 0,
    "decoder_sparse_step": 1,
    "eos_token_id": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": INTERMEDIATE,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
}
GENERATION_CONFIG = {
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": 1,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


def write_demo_checkpoint(folder: Path) -> None:
    """Write the small checkpoint, about 30 MB in several shards, into `folder`.

    Raises:
        MoequantError: it cannot be written.
    """
    write_tensors(folder, CONFIG, _tensors(CONFIG, LAYERS * EXPERTS), SHARD_BYTES)
    _write_json(folder / GENERATION_CONFIG_FILE, GENERATION_CONFIG)


def write_bench_checkpoint(folder: Path, size_bytes: int) -> int:
    """Write a checkpoint of about `size_bytes`, little but experts, in one file into `folder`.

    Returns:
        Bytes of its experts.

    Raises:
        MoequantError: it cannot be written.
    """
    total = max(1, round(size_bytes / EXPERT_BYTES))
    layers = -(-total // BENCH_EXPERTS)
    experts = -(-total // layers)
    config = CONFIG | {
        "hidden_size": BENCH_HIDDEN,
        "intermediate_size": 3 * BENCH_HIDDEN,
        "moe_intermediate_size": BENCH_INTERMEDIATE,
        "num_attention_heads": 1,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "vocab_size": 256,
    }
    write_tensors(folder, config, _tensors(config, _DISTINCT))
    return layers * experts * EXPERT_BYTES


def write_tensors(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: float = math.inf,
) -> None:
    """Write a checkpoint: these tensors in this order, their index, and config.json.

    All tensors are in memory at once; one that comes several times is there once.

    Raises:
        MoequantError: it cannot be written.
    """
    with explained(folder, "created"):
        folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        specs = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in shard.items()]
        writer = ShardWriter(folder / file, *lay_out(specs))
        for name, tensor in shard.items():
            writer.write(name, tensor)
        writer.finish()
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)
    _write_json(folder / CONFIG_FILE, config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with explained(path, "written"):
        path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _shards(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: float
) -> Iterator[dict[str, Tensor]]:
    """Tensors in the given order, split into shards as transformers does."""
    shard: dict[str, Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        if size_bytes + tensor.nbytes > shard_bytes:
            yield shard
            shard, size_bytes = {}, 0
        shard[name] = tensor
        size_bytes += tensor.nbytes
    yield shard


def _tensors(config: Mapping[str, Any], distinct: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors in model order; of the experts, `distinct` are random and the others repeat them."""
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    head = config["head_dim"]
    queries, keys = (config[f"num_{k}_heads"] * head for k in ("attention", "key_value"))
    made: list[dict[str, Tensor]] = []

    def normal(rows: int, cols: int, gain: Tensor | float = 1.0) -> Tensor:
        return (torch.randn(rows, cols, generator=generator) * STD * gain).bfloat16()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", normal(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        # Outliers are channels of the residual stream: the same for all experts of a layer.
        gain = torch.ones(hidden)
        gain[torch.randperm(hidden, generator=generator)[:OUTLIER_CHANNELS]] = OUTLIER_GAIN
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_proj.weight", normal(queries, hidden)
        yield f"{attention}.k_proj.weight", normal(keys, hidden)
        yield f"{attention}.v_proj.weight", normal(keys, hidden)
        yield f"{attention}.o_proj.weight", normal(hidden, queries)
        yield f"{attention}.q_norm.weight", ones(head)
        yield f"{attention}.k_norm.weight", ones(head)
        yield f"{prefix}.mlp.gate.weight", normal(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            if len(made) < distinct:
                gate, up = normal(intermediate, hidden, gain), normal(intermediate, hidden, gain)
                made.append(
                    {"gate": gate, "up": up, "down": normal(hidden, intermediate, gain[:, None])}
                )
            for name, weight in made[(layer * config["num_experts"] + expert) % distinct].items():
                yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", weight
        yield f"{prefix}.input_layernorm.weight", ones(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", normal(config["vocab_size"], hidden)
