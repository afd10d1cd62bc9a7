"""Every model_type of the architecture table, small, as its release lies on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moequant.integrations.transformers_library import CANNOT_RUN
from moequant.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

# All experts for each token: one that is chosen instead of another would say nothing of how near
# the weights are.
E, LAYERS = 4, 3
ZERO_EXPERTS = 2
SMALL = (64, 96)
"""Hidden and intermediate size: H, I."""

Tensors = dict[str, torch.Tensor]


def as_it_is(tensors):
    return tensors


@dataclass(frozen=True)
class Case:
    """One model_type: a class of transformers, which layers hold experts, and what a release does.

    `released` turns what transformers 5.24 saves into what the release has on disk, where that is
    not the same; `loadable` adds what it wants and the release has not. `stack`, of a release that
    stacks experts, puts [E, I, H], [E, I, H] and [E, H, I] of gate, up and down together: two
    tensors, or three. `written` turns the config.json that is saved into the release's.
    """

    model: type
    config: Any
    layers: tuple[int, ...]
    released: Callable[[Tensors], Tensors] = as_it_is
    loadable: Callable[[Tensors], Tensors] = as_it_is
    stack: Callable[..., tuple[torch.Tensor, ...]] | None = None
    written: Callable[[dict[str, Any]], dict[str, Any]] = as_it_is


def each(gate, up, down):
    return gate, up, down


def below_each_other(gate, up, down):
    return gate.flatten(0, 1), up.flatten(0, 1), down.mT.flatten(0, 1)


def halves(gate, up, down):
    return torch.cat([gate, up], 1), down


def turned_halves(gate, up, down):
    return torch.cat([gate, up], 1).mT, down.mT


def turned_turns(gate, up, down):
    return torch.stack([gate, up], 2).flatten(1, 2).mT, down.mT


def stacked_by_hand(tensors):
    """Qwen3.5 in BF16: transformers 5 saves each expert on its own, the release stacks them."""
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    others = {}
    for name, tensor in tensors.items():
        block, found, rest = name.partition(".experts.")
        if not found:
            others[name] = tensor
            continue
        expert, projection, _ = rest.split(".")
        ordered = parts.setdefault(block, {}).setdefault(projection, [None] * E)
        ordered[int(expert)] = tensor
    for block, projections in parts.items():
        gate, up, down = (torch.stack(projections[f"{p}_proj"]) for p in ("gate", "up", "down"))
        others[f"{block}.experts.gate_up_proj"], others[f"{block}.experts.down_proj"] = halves(
            gate, up, down
        )
    return others


def turned_by_hand(tensors):
    """Qwen3-VL: transformers 5.24 turns the matrices as it loads them, and not as it saves them."""
    return {n: w.mT if ".mlp.experts." in n else w for n, w in tensors.items()}


def renamed_by_hand(tensors):
    """Kimi-K2.5: transformers 5.24 saves other names of layers and of a norm than it loads."""
    renamed = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
    }
    for old, new in renamed.items():
        tensors = {n.replace(old, new) if n.startswith(old) else n: w for n, w in tensors.items()}
    return tensors


def without_zero_experts(tensors):
    """LongCat: transformers 5.24 keeps a gate and an up of experts that have none, and no down."""
    surplus = tuple(f".experts.{e}." for e in range(E, E + ZERO_EXPERTS))
    return {n: w for n, w in tensors.items() if not any(part in n for part in surplus)}


def with_zero_experts(tensors):
    added = {}
    for name, w in tensors.items():
        if ".experts.0." in name and "down_proj" not in name:
            for e in range(E, E + ZERO_EXPERTS):
                added[name.replace(".experts.0.", f".experts.{e}.")] = torch.zeros_like(w)
    return tensors | added


def named_as_released(tensors):
    """DeepSeek-V4: transformers 5.24 saves `model.` and three names that it reads otherwise."""
    renamed = {"embed_tokens.weight": "embed.weight", "hc_head.hc_": "hc_head_"}
    for old, new in renamed.items():
        tensors = {n.replace(old, new): w for n, w in tensors.items()}
    return {n.removeprefix("model."): w for n, w in tensors.items()}


_VISION: dict[int, Tensors] = {}
"""Of Step-3.7, by hidden size."""


def without_vision(tensors):
    """Step-3.5: the language model of a Step-3.7 alone."""
    vision = ("vision_model.", "vit_large_projector.")
    dropped = {n: w for n, w in tensors.items() if n.startswith(vision)}
    _VISION[tensors["model.embed_tokens.weight"].shape[1]] = dropped
    return {n: w for n, w in tensors.items() if n not in dropped}


def with_vision(tensors):
    return tensors | _VISION[tensors["model.embed_tokens.weight"].shape[1]]


def language_model_alone(config):
    return config["text_config"]


@dataclass(frozen=True)
class Sizes:
    """Fields of configs, as models name them, for hidden and intermediate size H and I."""

    H: int
    I: int

    @property
    def common(self):
        return {
            "vocab_size": 64,
            "hidden_size": self.H,
            "intermediate_size": 128,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts_per_tok": E,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }

    @property
    def one_size(self):
        """Of models whose experts' size is called as that of a dense MLP."""
        return self.common | {"intermediate_size": self.I}

    @property
    def experts(self):
        return {"num_experts": E, "moe_intermediate_size": self.I}

    @property
    def routed(self):
        return {"n_routed_experts": E, "moe_intermediate_size": self.I}

    @property
    def groups(self):
        return self.routed | ONE_GROUP | {"first_k_dense_replace": 1}

    @property
    def mla(self):
        """Of DeepSeek's attention and experts."""
        return self.groups | {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        }


ONE_GROUP = {"n_group": 1, "topk_group": 1}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
SHARED = {"shared_expert_intermediate_size": 48}
KINDS = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
LINEAR_ATTENTION = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
PATCHES = {"image_size": 28, "patch_size": 14}
PIXTRAL = {**VISION, **PATCHES, "model_type": "pixtral"}


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


_CONFIGS: dict[str, tuple[Callable[[Sizes], Any], dict[str, Any]]] = {}
"""By model_type: what makes the config, and the other fields of its `Case`."""


def case(model, layers, **others):
    """Make the function below, which is called as a model_type and gives its config, a `Case`."""

    def register(config):
        _CONFIGS[config.__name__] = config, {"model": model, "layers": layers, **others}
        return config

    return register


@cache
def build(H: int, I: int) -> dict[str, Case]:
    """Every case with these sizes, by model_type."""
    sizes = Sizes(H, I)
    return {
        name: Case(config=config(sizes), **others) for name, (config, others) in _CONFIGS.items()
    }


@case(t.Qwen2MoeForCausalLM, (1, 2))
def qwen2_moe(s):
    return t.Qwen2MoeConfig(**s.common, **s.experts, **SHARED, mlp_only_layers=[0])


@case(t.Qwen3MoeForCausalLM, (1,))
def qwen3_moe(s):
    return t.Qwen3MoeConfig(**s.common, **s.experts, decoder_sparse_step=2)


@case(t.MixtralForCausalLM, (0, 1, 2))
def mixtral(s):
    return t.MixtralConfig(**s.one_size, num_local_experts=E)


@case(t.OlmoeForCausalLM, (0, 1, 2))
def olmoe(s):
    return t.OlmoeConfig(**s.one_size, num_experts=E)


@case(t.DeepseekV2ForCausalLM, (1, 2))
def deepseek_v2(s):
    return t.DeepseekV2Config(**s.common | s.mla)


@case(t.DeepseekV3ForCausalLM, (1, 2))
def deepseek_v3(s):
    return t.DeepseekV3Config(**s.common | s.mla)


@case(t.DeepseekV32ForCausalLM, (1, 2))
def deepseek_v32(s):
    return t.DeepseekV32Config(**s.common | s.mla | INDEXER)


# A DeepSeek-V3 by another model_type; transformers has no class called so.
@case(t.DeepseekV3ForCausalLM, (1, 2))
def kimi_k2(s):
    return deepseek_v3(s)


@case(t.Kimi_K25ForConditionalGeneration, (1, 2), released=renamed_by_hand)
def kimi_k25(s):
    return t.Kimi_K25Config(
        text_config={**s.common, **s.mla, "model_type": "deepseek_v3"},
        vision_config={**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
    )


@case(t.Glm4MoeForCausalLM, (1, 2))
def glm4_moe(s):
    return t.Glm4MoeConfig(**s.common, **s.groups, head_dim=16)


@case(t.Glm4MoeLiteForCausalLM, (1, 2))
def glm4_moe_lite(s):
    return t.Glm4MoeLiteConfig(**s.common | s.mla)


@case(t.GlmMoeDsaForCausalLM, (1, 2))
def glm_moe_dsa(s):
    return t.GlmMoeDsaConfig(**s.common | s.mla | INDEXER)


@case(t.Dots1ForCausalLM, (1, 2))
def dots1(s):
    return t.Dots1Config(**s.common, **s.groups, n_shared_experts=1)


@case(t.MiniMaxM2ForCausalLM, (0, 1, 2))
def minimax_m2(s):
    return t.MiniMaxM2Config(**s.one_size, num_local_experts=E, head_dim=16)


@case(t.PhimoeForCausalLM, (0, 1, 2))
def phimoe(s):
    return t.PhimoeConfig(**s.one_size, num_local_experts=E, lm_head_bias=True, attention_bias=True)


@case(t.Qwen3NextForCausalLM, (0, 1, 2))
def qwen3_next(s):
    return t.Qwen3NextConfig(**s.common, **s.experts, **SHARED, **LINEAR_ATTENTION)


@case(t.Ernie4_5_MoeForCausalLM, (1,))
def ernie4_5_moe(s):
    return t.Ernie4_5_MoeConfig(
        **without(s.common, "num_experts_per_tok"),
        moe_intermediate_size=s.I,
        moe_num_experts=E,
        moe_k=E,
        moe_num_shared_experts=1,
        moe_layer_end_index=1,
    )


@case(t.HunYuanMoEV1ForCausalLM, (0, 1, 2))
def hunyuan_v1_moe(s):
    return t.HunYuanMoEV1Config(
        **without(s.one_size, "num_experts_per_tok"),
        num_experts=E,
        moe_topk=[E] * LAYERS,
        moe_intermediate_size=[s.I] * LAYERS,
        head_dim=16,
    )


@case(t.FlexOlmoForCausalLM, (0, 1, 2))
def flex_olmo(s):
    return t.FlexOlmoConfig(**s.one_size, num_experts=E)


@case(t.JambaForCausalLM, (1,))
def jamba(s):
    return t.JambaConfig(
        **s.one_size,
        num_experts=E,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
    )


@case(
    t.LongcatFlashForCausalLM,
    (0, 1, 2),
    released=without_zero_experts,
    loadable=with_zero_experts,
)
def longcat_flash(s):
    named_otherwise = ("num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size")
    return t.LongcatFlashConfig(
        **without(s.common | s.mla, *named_otherwise),
        num_layers=LAYERS,
        head_dim=8,
        ffn_hidden_size=128,
        expert_ffn_hidden_size=s.I,
        moe_topk=E,
        zero_expert_num=ZERO_EXPERTS,
    )


@case(t.Lfm2MoeForCausalLM, (1, 2))
def lfm2_moe(s):
    kinds = ["conv", "full_attention", "conv"]
    return t.Lfm2MoeConfig(**s.common, **s.experts, num_dense_layers=1, layer_types=kinds)


@case(t.GptOssForCausalLM, (0, 1, 2), stack=turned_turns)
def gpt_oss(s):
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    return t.GptOssConfig(**s.one_size, num_local_experts=E, head_dim=16, rope_parameters=rope)


def qwen3_5(s):
    return s.common | s.experts | SHARED | LINEAR_ATTENTION


def qwen_vision(s):
    return {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": s.H,
        "num_position_embeddings": 16,
    }


@case(t.Qwen3_5MoeForCausalLM, (0, 1, 2), released=stacked_by_hand, stack=halves)
def qwen3_5_moe_text(s):
    return t.Qwen3_5MoeTextConfig(**qwen3_5(s))


@case(t.Qwen3_5MoeForConditionalGeneration, (0, 1, 2), released=stacked_by_hand, stack=halves)
def qwen3_5_moe(s):
    return t.Qwen3_5MoeConfig(text_config=qwen3_5(s), vision_config=qwen_vision(s))


@case(t.Qwen3VLMoeForConditionalGeneration, (0, 1, 2), released=turned_by_hand, stack=turned_halves)
def qwen3_vl_moe(s):
    return t.Qwen3VLMoeConfig(
        text_config={**s.common, **s.experts, "head_dim": 16},
        vision_config={**qwen_vision(s), "deepstack_visual_indexes": [0]},
    )


def llama4_language_model(s):
    return s.one_size | {
        "num_local_experts": E,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
    }


@case(t.Llama4ForCausalLM, (0, 1), stack=turned_halves)
def llama4_text(s):
    return t.Llama4TextConfig(**llama4_language_model(s), moe_layers=[0, 1])


@case(t.Llama4ForConditionalGeneration, (1,), stack=turned_halves)
def llama4(s):
    projector = ("vision_output_dim", "projector_input_dim", "projector_output_dim")
    return t.Llama4Config(
        text_config=llama4_language_model(s),
        vision_config={**VISION, **PATCHES, **dict.fromkeys(projector, 32)},
    )


@case(t.GraniteMoeForCausalLM, (0, 1, 2), stack=halves)
def granitemoe(s):
    return t.GraniteMoeConfig(**s.one_size, num_local_experts=E)


@case(t.GraniteMoeSharedForCausalLM, (0, 1, 2), stack=halves)
def granitemoeshared(s):
    return t.GraniteMoeSharedConfig(**s.one_size, num_local_experts=E, shared_intermediate_size=48)


@case(t.GraniteMoeHybridForCausalLM, (0, 1, 2), stack=halves)
def granitemoehybrid(s):
    return t.GraniteMoeHybridConfig(
        **s.one_size,
        num_local_experts=E,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=4,
        mamba_d_head=s.H // 2,
        mamba_n_groups=1,
        mamba_d_state=4,
    )


@case(t.NemotronHForCausalLM, (1, 4))
def nemotron_h(s):
    return t.NemotronHConfig(
        **without(s.common, "num_hidden_layers"),
        **s.routed,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
        moe_shared_expert_intermediate_size=48,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=4,
        chunk_size=8,
    )


@case(t.DbrxForCausalLM, (0, 1, 2), stack=below_each_other)
def dbrx(s):
    experts = {"moe_num_experts": E, "moe_top_k": E}
    return t.DbrxConfig(
        d_model=s.H,
        n_heads=4,
        n_layers=LAYERS,
        max_seq_len=64,
        vocab_size=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        ffn_config={"hidden_size": s.H, "ffn_hidden_size": s.I, **experts},
    )


def gemma4_language_model(s):
    return without(s.common, "num_experts_per_tok") | {
        "head_dim": 16,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "num_experts": E,
        "top_k_experts": E,
        "moe_intermediate_size": s.I,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }


@case(t.Gemma4ForCausalLM, (0, 1, 2), stack=halves)
def gemma4_text(s):
    return t.Gemma4TextConfig(**gemma4_language_model(s))


@case(t.Gemma4ForConditionalGeneration, (0, 1, 2), stack=halves)
def gemma4(s):
    return t.Gemma4Config(
        text_config=gemma4_language_model(s),
        vision_config={**VISION, "num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
    )


@case(t.DeepseekV4ForCausalLM, (0, 1, 2), released=named_as_released)
def deepseek_v4(s):
    attention = ("sliding", "compressed_sparse", "heavily_compressed")
    return t.DeepseekV4Config(
        **without(s.common, "intermediate_size", "num_key_value_heads"),
        **s.routed,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        layer_types=[f"{kind}_attention" for kind in attention],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        sliding_window=16,
    )


@case(t.Step3p7ForConditionalGeneration, (1, 2), stack=each)
def step3p7(s):
    return t.Step3p7Config(
        text_config={
            **s.common,
            **s.routed,
            "head_dim": 16,
            "share_expert_dim": 48,
            "moe_layers_enum": "1,2",
            "swiglu_limits": [0.0, 0.0, 1.0],
            "sliding_window": 16,
        },
        vision_config={**VISION, **PATCHES, "mlp_ratio": 2.0},
    )


@case(
    t.Step3p7ForConditionalGeneration,
    (1, 2),
    released=without_vision,
    loadable=with_vision,
    stack=each,
    written=language_model_alone,
)
def step3p5(s):
    return step3p7(s)


@case(t.MiniMaxM3SparseForConditionalGeneration, (1, 2))
def minimax_m3_vl(s):
    return t.MiniMaxM3VLConfig(
        text_config={
            **s.one_size,
            **KINDS,
            "num_local_experts": E,
            "head_dim": 16,
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 48,
            "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "rotary_dim": 8,
        },
        vision_config=VISION,
        projector_hidden_size=32,
    )


@case(t.MiniMaxForCausalLM, (0, 1, 2))
def minimax(s):
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return t.MiniMaxConfig(**s.one_size, num_local_experts=E, head_dim=16, layer_types=kinds)


@case(t.MiMoV2FlashForCausalLM, (1, 2))
def mimo_v2_flash(s):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    return t.MiMoV2FlashConfig(
        **s.common, **s.routed, **KINDS, **ONE_GROUP, head_dim=16, layer_types=kinds
    )


@case(t.HYV3ForCausalLM, (1, 2))
def hy_v3(s):
    return t.HYV3Config(**s.common, **s.experts, head_dim=16)


@case(t.ExaoneMoeForCausalLM, (1, 2))
def exaone_moe(s):
    return t.ExaoneMoeConfig(
        **s.common, **s.experts, **ONE_GROUP, num_shared_experts=1, head_dim=16
    )


@case(t.SolarOpenForCausalLM, (0, 1, 2))
def solar_open(s):
    return t.SolarOpenConfig(**s.common, **s.routed, **ONE_GROUP, head_dim=16)


@case(t.AfmoeForCausalLM, (1, 2))
def afmoe(s):
    return t.AfmoeConfig(**s.common, **s.experts, **ONE_GROUP, head_dim=16, num_dense_layers=1)


@case(t.LagunaForCausalLM, (1, 2))
def laguna(s):
    return t.LagunaConfig(**s.common, **s.experts, **SHARED, head_dim=16)


@case(t.Cohere2MoeForCausalLM, (0, 1, 2))
def cohere2_moe(s):
    return t.Cohere2MoeConfig(
        **s.one_size, num_experts=E, num_shared_experts=1, head_dim=16, logit_scale=1.0
    )


@case(t.Glm4vMoeForConditionalGeneration, (1, 2))
def glm4v_moe(s):
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [2, 3, 3],
    }
    return t.Glm4vMoeConfig(
        text_config={**s.common, **s.groups, "head_dim": 16, "rope_parameters": rope},
        vision_config=without(qwen_vision(s), "num_position_embeddings"),
    )


def linear_attention_twice(s):
    """Kimi-Linear's and Ling's language model."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    experts = {"num_local_experts": E, "layer_types": kinds}
    return s.common | s.mla | KINDS | experts


@case(t.KimiLinearForCausalLM, (1, 2))
def kimi_linear(s):
    return t.KimiLinearConfig(**linear_attention_twice(s), linear_num_heads=2, linear_head_dim=16)


@case(t.BailingHybridForCausalLM, (1, 2))
def bailing_hybrid(s):
    return t.BailingHybridConfig(**linear_attention_twice(s), head_dim=16)


@case(t.AXK1ForCausalLM, (1, 2))
def axk1(s):
    return t.AXK1Config(**s.common | s.mla | KINDS)


@case(t.AXK2ForCausalLM, (1, 2))
def axk2(s):
    return t.AXK2Config(**s.common | s.mla | KINDS | INDEXER)


@case(t.BeamForCausalLM, (1, 2))
def beam(s):
    return t.BeamConfig(**s.common, **s.experts, **ONE_GROUP, **KINDS, head_dim=16)


@case(t.FlintForCausalLM, (1, 2))
def flint(s):
    return t.FlintConfig(**s.common, **s.experts, **SHARED, head_dim=16, mlp_only_layers=[0])


@case(t.GraniteMoeSWAForCausalLM, (0, 1, 2), stack=halves)
def granitemoe_swa(s):
    return t.GraniteMoeSWAConfig(**s.one_size, num_local_experts=E, shared_intermediate_size=48)


@case(t.HYV4ForCausalLM, (1, 2), stack=halves)
def hy_v4(s):
    return t.HYV4Config(**s.common | s.mla | KINDS | INDEXER)


@case(t.HYV4VLForConditionalGeneration, (1, 2), stack=halves)
def hy_v4_vl(s):
    vision = {**VISION, "patch_size": 14, "max_image_size": 28, "out_hidden_size": s.H}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    language_model = s.common | s.mla | KINDS | INDEXER | {"rope_parameters": rope}
    return t.HYV4VLConfig(text_config=language_model, vision_config=vision)


@case(t.Kolibri1ForCausalLM, (0, 1, 2))
def kolibri1(s):
    sizes = without(s.common, "intermediate_size")
    return t.Kolibri1Config(**sizes, **s.experts, **SHARED, head_dim=16)


@case(t.LaraMiniForCausalLM, (0, 1, 2), stack=halves)
def lara_mini(s):
    return t.LaraMiniConfig(**s.common, **s.experts, **SHARED, **LINEAR_ATTENTION)


@case(t.MellumForCausalLM, (1, 2))
def mellum(s):
    return t.MellumConfig(**s.common, **s.experts, **KINDS, head_dim=16)


@case(t.Mistral4ForCausalLM, (1, 2), stack=halves)
def mistral4(s):
    return t.Mistral4Config(**s.common | s.mla)


@case(t.MistralLarge4ForConditionalGeneration, (1, 2))
def mistral_large4(s):
    language_model = without(s.common | s.mla, "q_lora_rank") | KINDS | INDEXER
    return t.MistralLarge4Config(
        text_config={**language_model, "model_type": "mistral_large4_text"},
        vision_config=PIXTRAL,
    )


@case(t.Glm5NextForConditionalGeneration, (1, 2))
def glm5_next(s):
    return t.Glm5NextConfig(
        text_config={
            **s.common,
            **s.mla,
            **KINDS,
            **INDEXER,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "index_kpool": 4,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "image_size": 28,
            "projection_intermediate_size": 64,
        },
    )


@case(t.Mistral3ForConditionalGeneration, (1, 2), stack=halves)
def mistral3(s):
    return t.Mistral3Config(
        text_config={**s.common, **s.mla, "model_type": "mistral4"}, vision_config=PIXTRAL
    )


def qwen4(s):
    return {
        **without(s.common, "intermediate_size"),
        **s.experts,
        **SHARED,
        **LINEAR_ATTENTION,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
    }


@case(t.Qwen4ExpForCausalLM, (0, 1, 2))
def qwen4_exp_text(s):
    return t.Qwen4ExpTextConfig(**qwen4(s))


@case(t.Qwen4ExpForConditionalGeneration, (0, 1, 2))
def qwen4_exp(s):
    return t.Qwen4ExpConfig(text_config=qwen4(s), vision_config=qwen_vision(s))


def reading(s, **encoder):
    """Of models that read pages, with fields of their second encoder."""
    sam = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "output_channels": 8,
        "image_size": 64,
        "patch_size": 16,
        "mlp_dim": 64,
        "downsample_channels": [8, 16],
        "global_attn_indexes": [0],
    }
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return {
        "text_config": {**s.common, **s.routed, **ONE_GROUP, **KINDS},
        "vision_config": {"sam_config": sam, "encoder_config": {**sizes, **encoder}},
    }


@case(t.UnlimitedOcrForConditionalGeneration, (1, 2))
def unlimited_ocr(s):
    return t.UnlimitedOcrConfig(**reading(s))


def qwen3_omni_talker(s):
    """What speaks, and holds experts that nothing converts."""
    model = {**s.common, **s.experts, **SHARED, "head_dim": 16, "num_hidden_layers": 1}
    return {
        "text_config": model,
        "code_predictor_config": {**model, "num_code_groups": 2},
        "thinker_hidden_size": s.H,
        "num_code_groups": 2,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
    }


@case(t.Qwen3OmniMoeForConditionalGeneration, (1, 2))
def qwen3_omni_moe(s):
    return t.Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": {**s.common, **s.experts, "head_dim": 16, "mlp_only_layers": [0]},
            "vision_config": {**qwen_vision(s), "deepstack_visual_indexes": [0]},
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "downsample_hidden_size": 16,
                "output_dim": s.H,
            },
        },
        talker_config=qwen3_omni_talker(s),
        code2wav_config={
            "codebook_size": 16,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_quantizers": 2,
            "decoder_dim": 32,
            "upsample_rates": (2,),
            "upsampling_ratios": (2,),
        },
    )


@case(t.DeepseekOcr2ForConditionalGeneration, (1, 2))
def deepseek_ocr2(s):
    return t.DeepseekOcr2Config(**reading(s, num_key_value_heads=2))


def in_language_config(config):
    """As DeepSeek-OCR-2 has it, whose config.json names no function between the GEMMs."""
    language_config = {"first_k_dense_replace": 1} | config["text_config"]
    del language_config["mlp_layer_types"], language_config["hidden_act"]
    return {**without(config, "text_config"), "language_config": language_config}


@case(t.DeepseekOcr2ForConditionalGeneration, (1, 2), written=in_language_config)
def deepseek_vl_v2(s):
    return deepseek_ocr2(s)


@dataclass(frozen=True)
class Saved:
    case: Case
    model: Any
    checkpoint: Checkpoint


@pytest.fixture(scope="session")
def models():
    """Every case, by model_type."""
    return build(*SMALL)


@pytest.fixture(scope="session")
def save(tmp_path_factory):
    """save(model_type): a model of transformers, and the checkpoint with it as it is released.

    Of hidden and intermediate size `sizes`.
    """
    made = {}

    def save(model_type, sizes=SMALL):
        if (model_type, sizes) not in made:
            path = tmp_path_factory.mktemp(model_type)
            made[model_type, sizes] = _save(model_type, sizes, path)
        return made[model_type, sizes]

    return save


@pytest.fixture(autouse=True)
def llama4_runs(monkeypatch):
    """In transformers 5.24.0 Llama 4 reads a field that its language model's output has not."""
    monkeypatch.delitem(CANNOT_RUN, ("5.24.0", "Llama4ForConditionalGeneration"))
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)


@pytest.fixture(params=build(*SMALL))
def saved(request, save):
    """`save` of every model_type."""
    return save(request.param)


def _save(model_type, sizes, path):
    case = build(*sizes)[model_type]
    torch.manual_seed(0)
    model = case.model(case.config).eval()
    with torch.no_grad():
        for name, w in model.named_parameters():
            # Large enough that experts decide the logits.
            if ".experts." in name and w.ndim > 1:
                w.normal_(std=2 * sizes[0] ** -0.5)
            # Gemma-4 adds a dense MLP to them, normalised as they are.
            if name.endswith("post_feedforward_layernorm_1.weight"):
                w.fill_(0.25)
            # Phi takes two experts whatever config.json says: which, must not hang on rounding.
            if name.endswith("layernorm.bias"):
                w.normal_(std=3)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = case.released(load_file(file))
    save_file({name: w.contiguous() for name, w in tensors.items()}, file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(case.written(config) | {"model_type": model_type}))
    return Saved(case, model, Checkpoint.open(path))
