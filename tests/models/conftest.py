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

from moequant.checkpoint.source import Checkpoint

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

    `released` turns what transformers 5.23 saves into what the release has on disk, where that is
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
    """Qwen3-VL: transformers 5.23 turns the matrices as it loads them, and not as it saves them."""
    return {n: w.mT if ".mlp.experts." in n else w for n, w in tensors.items()}


def renamed_by_hand(tensors):
    """Kimi-K2.5: transformers 5.23 saves other names of layers and of a norm than it loads."""
    renamed = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
    }
    for old, new in renamed.items():
        tensors = {n.replace(old, new) if n.startswith(old) else n: w for n, w in tensors.items()}
    return tensors


def without_zero_experts(tensors):
    """LongCat: transformers 5.23 keeps a gate and an up of experts that have none, and no down."""
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
    """DeepSeek-V4: transformers 5.23 saves `model.` and three names that it reads otherwise."""
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


@cache
def build(H: int, I: int) -> dict[str, Case]:
    """Every case with these sizes, by model_type."""
    SIZES = {
        "vocab_size": 64,
        "hidden_size": H,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": E,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    ONE_SIZE = SIZES | {"intermediate_size": I}
    EXPERTS = {"num_experts": E, "moe_intermediate_size": I}
    ROUTED = {"n_routed_experts": E, "moe_intermediate_size": I}
    GROUPS = ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    MLA = GROUPS | {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
    LINEAR_ATTENTION = {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    SHARED = {"shared_expert_intermediate_size": 48}
    QWEN3_5 = SIZES | EXPERTS | SHARED | LINEAR_ATTENTION
    LLAMA4 = ONE_SIZE | {
        "num_local_experts": E,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
    }
    QWEN_VISION = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": H,
        "num_position_embeddings": 16,
    }
    VISION = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    ROPE = {"rope_type": "default", "rope_theta": 150000.0}
    MODELS = {
        "qwen2_moe": Case(
            t.Qwen2MoeForCausalLM,
            t.Qwen2MoeConfig(**SIZES, **EXPERTS, **SHARED, mlp_only_layers=[0]),
            (1, 2),
        ),
        "qwen3_moe": Case(
            t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2), (1,)
        ),
        "mixtral": Case(
            t.MixtralForCausalLM, t.MixtralConfig(**ONE_SIZE, num_local_experts=E), (0, 1, 2)
        ),
        "olmoe": Case(t.OlmoeForCausalLM, t.OlmoeConfig(**ONE_SIZE, num_experts=E), (0, 1, 2)),
        "deepseek_v2": Case(t.DeepseekV2ForCausalLM, t.DeepseekV2Config(**SIZES | MLA), (1, 2)),
        "deepseek_v3": Case(t.DeepseekV3ForCausalLM, t.DeepseekV3Config(**SIZES | MLA), (1, 2)),
        "deepseek_v32": Case(
            t.DeepseekV32ForCausalLM, t.DeepseekV32Config(**SIZES | MLA | INDEXER), (1, 2)
        ),
        # A DeepSeek-V3 by another model_type; transformers has no class called so.
        "kimi_k2": Case(t.DeepseekV3ForCausalLM, t.DeepseekV3Config(**SIZES | MLA), (1, 2)),
        "kimi_k25": Case(
            t.Kimi_K25ForConditionalGeneration,
            t.Kimi_K25Config(
                text_config={**SIZES, **MLA, "model_type": "deepseek_v3"},
                vision_config={**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            ),
            (1, 2),
            released=renamed_by_hand,
        ),
        "glm4_moe": Case(
            t.Glm4MoeForCausalLM, t.Glm4MoeConfig(**SIZES, **GROUPS, head_dim=16), (1, 2)
        ),
        "glm4_moe_lite": Case(t.Glm4MoeLiteForCausalLM, t.Glm4MoeLiteConfig(**SIZES | MLA), (1, 2)),
        "glm_moe_dsa": Case(
            t.GlmMoeDsaForCausalLM, t.GlmMoeDsaConfig(**SIZES | MLA | INDEXER), (1, 2)
        ),
        "dots1": Case(
            t.Dots1ForCausalLM, t.Dots1Config(**SIZES, **GROUPS, n_shared_experts=1), (1, 2)
        ),
        "minimax_m2": Case(
            t.MiniMaxM2ForCausalLM,
            t.MiniMaxM2Config(**ONE_SIZE, num_local_experts=E, head_dim=16),
            (0, 1, 2),
        ),
        "phimoe": Case(
            t.PhimoeForCausalLM,
            t.PhimoeConfig(**ONE_SIZE, num_local_experts=E, lm_head_bias=True, attention_bias=True),
            (0, 1, 2),
        ),
        "qwen3_next": Case(
            t.Qwen3NextForCausalLM,
            t.Qwen3NextConfig(**SIZES, **EXPERTS, **SHARED, **LINEAR_ATTENTION),
            (0, 1, 2),
        ),
        "ernie4_5_moe": Case(
            t.Ernie4_5_MoeForCausalLM,
            t.Ernie4_5_MoeConfig(
                **{k: v for k, v in SIZES.items() if k != "num_experts_per_tok"},
                moe_intermediate_size=I,
                moe_num_experts=E,
                moe_k=E,
                moe_num_shared_experts=1,
                moe_layer_end_index=1,
            ),
            (1,),
        ),
        "hunyuan_v1_moe": Case(
            t.HunYuanMoEV1ForCausalLM,
            t.HunYuanMoEV1Config(
                **{k: v for k, v in ONE_SIZE.items() if k != "num_experts_per_tok"},
                num_experts=E,
                moe_topk=[E] * LAYERS,
                moe_intermediate_size=[I] * LAYERS,
                head_dim=16,
            ),
            (0, 1, 2),
        ),
        "flex_olmo": Case(
            t.FlexOlmoForCausalLM, t.FlexOlmoConfig(**ONE_SIZE, num_experts=E), (0, 1, 2)
        ),
        "jamba": Case(
            t.JambaForCausalLM,
            t.JambaConfig(
                **ONE_SIZE,
                num_experts=E,
                expert_layer_period=2,
                expert_layer_offset=1,
                attn_layer_period=2,
                attn_layer_offset=1,
                mamba_d_state=4,
            ),
            (1,),
        ),
        "longcat_flash": Case(
            t.LongcatFlashForCausalLM,
            t.LongcatFlashConfig(
                **{
                    k: v
                    for k, v in (SIZES | MLA).items()
                    if k
                    not in ("num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size")
                },
                num_layers=LAYERS,
                head_dim=8,
                ffn_hidden_size=128,
                expert_ffn_hidden_size=I,
                moe_topk=E,
                zero_expert_num=ZERO_EXPERTS,
            ),
            (0, 1, 2),
            released=without_zero_experts,
            loadable=with_zero_experts,
        ),
        "lfm2_moe": Case(
            t.Lfm2MoeForCausalLM,
            t.Lfm2MoeConfig(
                **SIZES,
                **EXPERTS,
                num_dense_layers=1,
                layer_types=["conv", "full_attention", "conv"],
            ),
            (1, 2),
        ),
        "gpt_oss": Case(
            t.GptOssForCausalLM,
            t.GptOssConfig(**ONE_SIZE, num_local_experts=E, head_dim=16, rope_parameters=ROPE),
            (0, 1, 2),
            stack=turned_turns,
        ),
        "qwen3_5_moe_text": Case(
            t.Qwen3_5MoeForCausalLM,
            t.Qwen3_5MoeTextConfig(**QWEN3_5),
            (0, 1, 2),
            released=stacked_by_hand,
            stack=halves,
        ),
        "qwen3_5_moe": Case(
            t.Qwen3_5MoeForConditionalGeneration,
            t.Qwen3_5MoeConfig(text_config=QWEN3_5, vision_config=QWEN_VISION),
            (0, 1, 2),
            released=stacked_by_hand,
            stack=halves,
        ),
        "qwen3_vl_moe": Case(
            t.Qwen3VLMoeForConditionalGeneration,
            t.Qwen3VLMoeConfig(
                text_config={**SIZES, **EXPERTS, "head_dim": 16},
                vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
            ),
            (0, 1, 2),
            released=turned_by_hand,
            stack=turned_halves,
        ),
        "llama4_text": Case(
            t.Llama4ForCausalLM,
            t.Llama4TextConfig(**LLAMA4 | {"moe_layers": [0, 1]}),
            (0, 1),
            stack=turned_halves,
        ),
        "llama4": Case(
            t.Llama4ForConditionalGeneration,
            t.Llama4Config(
                text_config=LLAMA4,
                vision_config={
                    **VISION,
                    "image_size": 28,
                    "patch_size": 14,
                    "vision_output_dim": 32,
                    "projector_input_dim": 32,
                    "projector_output_dim": 32,
                },
            ),
            (1,),
            stack=turned_halves,
        ),
        "granitemoe": Case(
            t.GraniteMoeForCausalLM,
            t.GraniteMoeConfig(**ONE_SIZE, num_local_experts=E),
            (0, 1, 2),
            stack=halves,
        ),
        "granitemoeshared": Case(
            t.GraniteMoeSharedForCausalLM,
            t.GraniteMoeSharedConfig(**ONE_SIZE, num_local_experts=E, shared_intermediate_size=48),
            (0, 1, 2),
            stack=halves,
        ),
        "granitemoehybrid": Case(
            t.GraniteMoeHybridForCausalLM,
            t.GraniteMoeHybridConfig(
                **ONE_SIZE,
                num_local_experts=E,
                shared_intermediate_size=48,
                layer_types=["mamba", "attention", "mamba"],
                mamba_n_heads=4,
                mamba_d_head=H // 2,
                mamba_n_groups=1,
                mamba_d_state=4,
            ),
            (0, 1, 2),
            stack=halves,
        ),
    }
    WITHOUT_LAYERS = {k: v for k, v in SIZES.items() if k != "num_hidden_layers"}
    NEMOTRON = WITHOUT_LAYERS | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "n_routed_experts": E,
        "moe_intermediate_size": I,
        "moe_shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 4,
        "chunk_size": 8,
    }
    GEMMA4 = {k: v for k, v in SIZES.items() if k != "num_experts_per_tok"} | {
        "head_dim": 16,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "num_experts": E,
        "top_k_experts": E,
        "moe_intermediate_size": I,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    MODELS |= {
        "nemotron_h": Case(t.NemotronHForCausalLM, t.NemotronHConfig(**NEMOTRON), (1, 4)),
        "dbrx": Case(
            t.DbrxForCausalLM,
            t.DbrxConfig(
                d_model=H,
                n_heads=4,
                n_layers=LAYERS,
                max_seq_len=64,
                vocab_size=64,
                attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
                ffn_config={
                    "hidden_size": H,
                    "ffn_hidden_size": I,
                    "moe_num_experts": E,
                    "moe_top_k": E,
                },
            ),
            (0, 1, 2),
            stack=below_each_other,
        ),
        "gemma4_text": Case(
            t.Gemma4ForCausalLM, t.Gemma4TextConfig(**GEMMA4), (0, 1, 2), stack=halves
        ),
        "gemma4": Case(
            t.Gemma4ForConditionalGeneration,
            t.Gemma4Config(
                text_config=GEMMA4,
                vision_config={**VISION, "num_key_value_heads": 2, "head_dim": 16},
                audio_config=None,
            ),
            (0, 1, 2),
            stack=halves,
        ),
        "deepseek_v4": Case(
            t.DeepseekV4ForCausalLM,
            t.DeepseekV4Config(
                **{k: v for k, v in SIZES.items() if k not in ("intermediate_size",)}
                | {"num_key_value_heads": 1},
                n_routed_experts=E,
                moe_intermediate_size=I,
                head_dim=16,
                q_lora_rank=16,
                o_groups=2,
                o_lora_rank=8,
                index_n_heads=2,
                index_head_dim=16,
                index_topk=8,
                layer_types=[
                    "sliding_attention",
                    "compressed_sparse_attention",
                    "heavily_compressed_attention",
                ],
                mlp_layer_types=["hash_moe", "moe", "moe"],
                partial_rotary_factor=0.5,
                sliding_window=16,
            ),
            (0, 1, 2),
            released=named_as_released,
        ),
    }
    STEP = {
        "text_config": {
            **SIZES,
            **ROUTED,
            "head_dim": 16,
            "share_expert_dim": 48,
            "moe_layers_enum": "1,2",
            "swiglu_limits": [0.0, 0.0, 1.0],
            "sliding_window": 16,
        },
        "vision_config": {**VISION, "image_size": 28, "patch_size": 14, "mlp_ratio": 2.0},
    }
    MODELS["step3p7"] = Case(
        t.Step3p7ForConditionalGeneration, t.Step3p7Config(**STEP), (1, 2), stack=each
    )
    MODELS["step3p5"] = Case(
        t.Step3p7ForConditionalGeneration,
        t.Step3p7Config(**STEP),
        (1, 2),
        released=without_vision,
        loadable=with_vision,
        stack=each,
        written=language_model_alone,
    )
    KINDS = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    ONE_GROUP = {"n_group": 1, "topk_group": 1}
    KIMI = SIZES | MLA | KINDS | {"num_local_experts": E, "moe_intermediate_size": I}
    MODELS |= {
        "minimax_m3_vl": Case(
            t.MiniMaxM3SparseForConditionalGeneration,
            t.MiniMaxM3VLConfig(
                text_config={
                    **ONE_SIZE,
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
            ),
            (1, 2),
        ),
        "minimax": Case(
            t.MiniMaxForCausalLM,
            t.MiniMaxConfig(
                **ONE_SIZE,
                num_local_experts=E,
                head_dim=16,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
            ),
            (0, 1, 2),
        ),
        "mimo_v2_flash": Case(
            t.MiMoV2FlashForCausalLM,
            t.MiMoV2FlashConfig(
                **SIZES,
                **ROUTED,
                **KINDS,
                **ONE_GROUP,
                head_dim=16,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
            ),
            (1, 2),
        ),
        "hy_v3": Case(t.HYV3ForCausalLM, t.HYV3Config(**SIZES, **EXPERTS, head_dim=16), (1, 2)),
        "exaone_moe": Case(
            t.ExaoneMoeForCausalLM,
            t.ExaoneMoeConfig(**SIZES, **EXPERTS, **ONE_GROUP, num_shared_experts=1, head_dim=16),
            (1, 2),
        ),
        "solar_open": Case(
            t.SolarOpenForCausalLM,
            t.SolarOpenConfig(**SIZES, **ROUTED, **ONE_GROUP, head_dim=16),
            (0, 1, 2),
        ),
        "afmoe": Case(
            t.AfmoeForCausalLM,
            t.AfmoeConfig(**SIZES, **EXPERTS, **ONE_GROUP, head_dim=16, num_dense_layers=1),
            (1, 2),
        ),
        "laguna": Case(
            t.LagunaForCausalLM,
            t.LagunaConfig(**SIZES, **EXPERTS, **SHARED, head_dim=16),
            (1, 2),
        ),
        "cohere2_moe": Case(
            t.Cohere2MoeForCausalLM,
            t.Cohere2MoeConfig(
                **ONE_SIZE, num_experts=E, num_shared_experts=1, head_dim=16, logit_scale=1.0
            ),
            (0, 1, 2),
        ),
        "glm4v_moe": Case(
            t.Glm4vMoeForConditionalGeneration,
            t.Glm4vMoeConfig(
                text_config={
                    **SIZES,
                    **GROUPS,
                    "head_dim": 16,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 10000.0,
                        "partial_rotary_factor": 1.0,
                        "mrope_section": [2, 3, 3],
                    },
                },
                vision_config={
                    "depth": 1,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_heads": 2,
                    "out_hidden_size": H,
                },
            ),
            (1, 2),
        ),
        "kimi_linear": Case(
            t.KimiLinearForCausalLM,
            t.KimiLinearConfig(
                **KIMI,
                layer_types=["linear_attention", "linear_attention", "full_attention"],
                linear_num_heads=2,
                linear_head_dim=16,
            ),
            (1, 2),
        ),
        "bailing_hybrid": Case(
            t.BailingHybridForCausalLM,
            t.BailingHybridConfig(
                **KIMI,
                head_dim=16,
                layer_types=["linear_attention", "linear_attention", "full_attention"],
            ),
            (1, 2),
        ),
    }
    WITHOUT_DENSE = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    PIXTRAL = {**VISION, "model_type": "pixtral", "patch_size": 14, "image_size": 28}
    MISTRAL_LARGE4 = SIZES | ROUTED | ONE_GROUP | KINDS | INDEXER | MLA
    MODELS |= {
        "axk1": Case(t.AXK1ForCausalLM, t.AXK1Config(**SIZES | MLA | KINDS), (1, 2)),
        "axk2": Case(t.AXK2ForCausalLM, t.AXK2Config(**SIZES | MLA | KINDS | INDEXER), (1, 2)),
        "beam": Case(
            t.BeamForCausalLM,
            t.BeamConfig(**SIZES, **EXPERTS, **ONE_GROUP, **KINDS, head_dim=16),
            (1, 2),
        ),
        "flint": Case(
            t.FlintForCausalLM,
            t.FlintConfig(**SIZES, **EXPERTS, **SHARED, head_dim=16, mlp_only_layers=[0]),
            (1, 2),
        ),
        "granitemoe_swa": Case(
            t.GraniteMoeSWAForCausalLM,
            t.GraniteMoeSWAConfig(**ONE_SIZE, num_local_experts=E, shared_intermediate_size=48),
            (0, 1, 2),
            stack=halves,
        ),
        "hy_v4": Case(
            t.HYV4ForCausalLM,
            t.HYV4Config(**SIZES | MLA | KINDS | INDEXER),
            (1, 2),
            stack=halves,
        ),
        "kolibri1": Case(
            t.Kolibri1ForCausalLM,
            t.Kolibri1Config(**WITHOUT_DENSE, **EXPERTS, **SHARED, head_dim=16),
            (0, 1, 2),
        ),
        "mellum": Case(
            t.MellumForCausalLM, t.MellumConfig(**SIZES, **EXPERTS, **KINDS, head_dim=16), (1, 2)
        ),
        "mistral4": Case(
            t.Mistral4ForCausalLM, t.Mistral4Config(**SIZES | MLA), (1, 2), stack=halves
        ),
        "mistral_large4": Case(
            t.MistralLarge4ForConditionalGeneration,
            t.MistralLarge4Config(
                text_config={
                    **{k: v for k, v in MISTRAL_LARGE4.items() if k != "q_lora_rank"},
                    "model_type": "mistral_large4_text",
                },
                vision_config=PIXTRAL,
            ),
            (1, 2),
        ),
        "glm5_next": Case(
            t.Glm5NextForConditionalGeneration,
            t.Glm5NextConfig(
                text_config={
                    **SIZES,
                    **MLA,
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
            ),
            (1, 2),
        ),
    }
    QWEN4 = {
        **WITHOUT_DENSE,
        **EXPERTS,
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
    SAM = {
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
    OCR = {
        "text_config": {**SIZES, **ROUTED, **ONE_GROUP, **KINDS},
        "vision_config": {
            "sam_config": SAM,
            "encoder_config": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        },
    }
    MODELS |= {
        "mistral3": Case(
            t.Mistral3ForConditionalGeneration,
            t.Mistral3Config(
                text_config={**SIZES, **MLA, "model_type": "mistral4"}, vision_config=PIXTRAL
            ),
            (1, 2),
            stack=halves,
        ),
        "qwen4_exp_text": Case(t.Qwen4ExpForCausalLM, t.Qwen4ExpTextConfig(**QWEN4), (0, 1, 2)),
        "qwen4_exp": Case(
            t.Qwen4ExpForConditionalGeneration,
            t.Qwen4ExpConfig(text_config=QWEN4, vision_config=QWEN_VISION),
            (0, 1, 2),
        ),
        "unlimited_ocr": Case(
            t.UnlimitedOcrForConditionalGeneration, t.UnlimitedOcrConfig(**OCR), (1, 2)
        ),
    }
    TALKER = {**SIZES, **EXPERTS, **SHARED, "head_dim": 16, "num_hidden_layers": 1}
    MODELS["qwen3_omni_moe"] = Case(
        t.Qwen3OmniMoeForConditionalGeneration,
        t.Qwen3OmniMoeConfig(
            thinker_config={
                "text_config": {**SIZES, **EXPERTS, "head_dim": 16, "mlp_only_layers": [0]},
                "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
                "audio_config": {
                    "d_model": 32,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 32,
                    "downsample_hidden_size": 16,
                    "output_dim": H,
                },
            },
            talker_config={
                "text_config": TALKER,
                "code_predictor_config": {**TALKER, "num_code_groups": 2},
                "thinker_hidden_size": H,
                "num_code_groups": 2,
                "accept_hidden_layer": 1,
                "spatial_merge_size": 2,
            },
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
        ),
        (1, 2),
    )
    OCR["vision_config"]["encoder_config"]["num_key_value_heads"] = 2
    MODELS["deepseek_ocr2"] = Case(
        t.DeepseekOcr2ForConditionalGeneration, t.DeepseekOcr2Config(**OCR), (1, 2)
    )
    return MODELS


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
