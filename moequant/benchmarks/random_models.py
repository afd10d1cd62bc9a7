"""Whole models with the sizes of releases, fewer layers and random weights, to be timed.

Sizes are those of each release's config.json; the number of layers and the vocabulary are the
caller's. Tensors have the names of the releases, gpt-oss in BF16 those of transformers. Weights are
N(0, 0.02**2), so that routers spread tokens over all experts; experts repeat a few random ones, in
memory of their own once they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moequant.benchmarks.random_checkpoint import STD, write_tensors
from moequant.benchmarks.shapes import model_name
from moequant.errors import ArgumentError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    Tensors = Iterator[tuple[str, Tensor]]

_DISTINCT = 4
"""Experts with weights of their own."""
_DENSE_FIRST = 3
"""Layers of DeepSeek-V3 without experts, of 61; of a smaller model at most a quarter of its layers.

More would hide what experts take of a step.
"""

_COMMON = {
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": STD,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}
_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": _DENSE_FIRST,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
_GPT_OSS_20B = _GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}


class _Random:
    """Random BF16 tensors in host memory, made on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """N(0, STD**2)."""
        device = self._generator.device
        values = torch.randn(shape, generator=self._generator, device=device, dtype=torch.float32)
        return values.mul_(STD).bfloat16().cpu()


@dataclass(frozen=True)
class RandomModel:
    """A model to be written with random weights.

    Attributes:
        config: its config.json.
        tensors: its tensors by name, of a config and a source of random numbers.
    """

    config: Mapping[str, Any]
    tensors: Callable[[Mapping[str, Any], _Random], Tensors]

    def resized(self, layers: int, vocabulary: int | None = None) -> RandomModel:
        """The same with other numbers of layers and of tokens; by default its own vocabulary.

        Raises:
            ArgumentError: there are fewer than one layer or 64 tokens.
        """
        vocabulary = self.config["vocab_size"] if vocabulary is None else vocabulary
        if layers < 1 or vocabulary < _MIN_VOCABULARY:
            raise ArgumentError(
                f"{layers} layers and a vocabulary of {vocabulary}, but at least 1 and "
                f"{_MIN_VOCABULARY} are needed"
            )
        config = {**_COMMON, **self.config, "num_hidden_layers": layers, "vocab_size": vocabulary}
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = min(_DENSE_FIRST, layers // 4)
        return RandomModel(config, self.tensors)

    def write(self, folder: Path, device: torch.device) -> None:
        """Write the model into `folder`; random numbers are made on `device`.

        Raises:
            MoequantError: it cannot be written.
        """
        write_tensors(folder, self.config, self.tensors(self.config, _Random(device)))


_MIN_VOCABULARY = 64


def random_model(name: str) -> RandomModel:
    """The model called `name` in MODELS, or `gpt-oss`; raises ArgumentError for another name."""
    if (known := model_name(name)) not in MODELS:
        raise ArgumentError(unknown_name("model", name, MODELS))
    return MODELS[known]


def _qwen3_moe(config: Mapping[str, Any], random: _Random) -> Tensors:
    H, I, E = (config[k] for k in ("hidden_size", "moe_intermediate_size", "num_experts"))
    experts = [_mlp(random, H, I) for _ in range(min(E, _DISTINCT))]
    yield from _outside(config, random)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from _grouped_attention(at, config, random, biased=False)
        for part in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{part}.weight", _ones(config["head_dim"])
        yield f"{at}.mlp.gate.weight", random.normal(E, H)
        for expert in range(E):
            yield from _named(f"{at}.mlp.experts.{expert}", experts[expert % len(experts)])
        yield from _norms(at, H)


def _deepseek_v3(config: Mapping[str, Any], random: _Random) -> Tensors:
    H, I, E = (config[k] for k in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    experts = [_mlp(random, H, I) for _ in range(min(E, _DISTINCT))]
    yield from _outside(config, random)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from _latent_attention(at, config, random)
        if layer < config["first_k_dense_replace"]:
            yield from _named(f"{at}.mlp", _mlp(random, H, config["intermediate_size"]))
        else:
            yield f"{at}.mlp.gate.weight", random.normal(E, H)
            yield f"{at}.mlp.gate.e_score_correction_bias", torch.zeros(E)
            for expert in range(E):
                yield from _named(f"{at}.mlp.experts.{expert}", experts[expert % len(experts)])
            shared = _mlp(random, H, I * config["n_shared_experts"])
            yield from _named(f"{at}.mlp.shared_experts", shared)
        yield from _norms(at, H)


def _gpt_oss(config: Mapping[str, Any], random: _Random) -> Tensors:
    H, I, E = (config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    # One for all layers: a stack of 120B's experts has 6 GB.
    repeats = torch.arange(E) % min(E, _DISTINCT)
    stacks = {
        name: random.normal(min(E, _DISTINCT), *shape)[repeats]
        for name, shape in {
            "gate_up_proj": (H, 2 * I),
            "gate_up_proj_bias": (2 * I,),
            "down_proj": (I, H),
            "down_proj_bias": (H,),
        }.items()
    }
    yield from _outside(config, random)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from _grouped_attention(at, config, random, biased=True)
        yield f"{at}.self_attn.sinks", random.normal(config["num_attention_heads"])
        yield f"{at}.mlp.router.weight", random.normal(E, H)
        yield f"{at}.mlp.router.bias", random.normal(E)
        for name, stack in stacks.items():
            yield f"{at}.mlp.experts.{name}", stack
        yield from _norms(at, H)


def _outside(config: Mapping[str, Any], random: _Random) -> Tensors:
    """What is in no layer."""
    V, H = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", random.normal(V, H)
    yield "model.norm.weight", _ones(H)
    yield "lm_head.weight", random.normal(V, H)


def _grouped_attention(
    at: str, config: Mapping[str, Any], random: _Random, *, biased: bool
) -> Tensors:
    H = config["hidden_size"]
    queries, keys = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    rows = {"q": (queries, H), "k": (keys, H), "v": (keys, H), "o": (H, queries)}
    for name, shape in rows.items():
        yield f"{at}.self_attn.{name}_proj.weight", random.normal(*shape)
        if biased:
            yield f"{at}.self_attn.{name}_proj.bias", random.normal(shape[0])


def _latent_attention(at: str, config: Mapping[str, Any], random: _Random) -> Tensors:
    H, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope, nope, value = (
        config[key]
        for key in (
            "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
        )
    )  # fmt: skip
    shapes = {
        "q_a_proj": (q_rank, H),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, H),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (H, heads * value),
    }
    for name, shape in shapes.items():
        yield f"{at}.self_attn.{name}.weight", random.normal(*shape)
    yield f"{at}.self_attn.q_a_layernorm.weight", _ones(q_rank)
    yield f"{at}.self_attn.kv_a_layernorm.weight", _ones(kv_rank)


def _mlp(random: _Random, hidden: int, intermediate: int) -> dict[str, Tensor]:
    return {
        "gate_proj": random.normal(intermediate, hidden),
        "up_proj": random.normal(intermediate, hidden),
        "down_proj": random.normal(hidden, intermediate),
    }


def _named(module: str, weights: Mapping[str, Tensor]) -> Tensors:
    for name, weight in weights.items():
        yield f"{module}.{name}.weight", weight


def _norms(at: str, hidden: int) -> Tensors:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{name}.weight", _ones(hidden)


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


MODELS = {
    "qwen3-30b": RandomModel(_QWEN3_30B, _qwen3_moe),
    "deepseek-v3": RandomModel(_DEEPSEEK_V3, _deepseek_v3),
    "gpt-oss-120b": RandomModel(_GPT_OSS_120B, _gpt_oss),
    "gpt-oss-20b": RandomModel(_GPT_OSS_20B, _gpt_oss),
}
