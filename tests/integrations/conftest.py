"""Small models, saved by transformers itself, and their converted checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moequant.conversion import convert
from moequant.formats import dequantize
from moequant.weights.converted import ConvertedCheckpoint

EXPERTS = 4
VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # Ten times the usual, or experts of this size would hardly show in the logits.
    "initializer_range": 0.2,
    "dtype": "bfloat16",
}
MLA = {
    # As in every release: each head has keys and values of its own.
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
MODELS = {
    "qwen3_moe": lambda **sizes: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{
                **SIZES,
                "intermediate_size": 512,
                "moe_intermediate_size": 256,
                "num_experts": EXPERTS,
                "head_dim": 64,
                "tie_word_embeddings": True,
                **sizes,
            }
        )
    ),
    "mixtral": lambda **sizes: MixtralForCausalLM(
        MixtralConfig(**{**SIZES, "intermediate_size": 256, "num_local_experts": EXPERTS, **sizes})
    ),
    "deepseek_v3": lambda **sizes: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{
                **SIZES,
                **MLA,
                "n_group": 2,
                "topk_group": 1,
                "num_nextn_predict_layers": 0,
                **sizes,
            }
        )
    ),
    "gpt_oss": lambda **sizes: GptOssForCausalLM(
        GptOssConfig(
            **{
                **SIZES,
                "intermediate_size": 256,
                "num_local_experts": EXPERTS,
                "head_dim": 64,
                **sizes,
            }
        )
    ),
    "qwen2_moe": lambda **sizes: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **{
                **SIZES,
                "intermediate_size": 512,
                "moe_intermediate_size": 256,
                "shared_expert_intermediate_size": 256,
                "num_experts": EXPERTS,
                **sizes,
            }
        )
    ),
    "olmoe": lambda **sizes: OlmoeForCausalLM(
        OlmoeConfig(**{**SIZES, "intermediate_size": 256, "num_experts": EXPERTS, **sizes})
    ),
    "deepseek_v2": lambda **sizes: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**SIZES, **MLA, "topk_method": "greedy", "num_nextn_predict_layers": 0, **sizes}
        )
    ),
}


@pytest.fixture(scope="session")
def models():
    """models[name](**sizes): a model of transformers with random weights."""
    return MODELS


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """sources(name): a model in BF16; not to be changed."""
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            model = MODELS[name]().to(torch.bfloat16)
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):  # which transformers begins at 0
                    torch.nn.init.normal_(parameter, std=0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name], max_shard_size="1MB")
        return made[name]

    return make


@pytest.fixture(scope="session")
def converted(sources, tmp_path_factory):
    """converted(name, format): a model in a format, converted once; not to be changed."""
    made = {}

    def make(name, format):
        if (name, format) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{format}") / "out"
            made[name, format] = convert(sources(name), folder, format=format).output
        return made[name, format]

    return make


@pytest.fixture(scope="session")
def decoded(sources, converted):
    """decoded(name, format, dtype): transformers' own model, its experts our `dequantize`."""

    def make(name, format, dtype):
        model = AutoModelForCausalLM.from_pretrained(
            sources(name), dtype=dtype, experts_implementation="eager"
        )
        checkpoint = ConvertedCheckpoint.open(converted(name, format))
        for layer in checkpoint.expert_layers():
            gate, up, down = (
                torch.stack(
                    [dequantize(checkpoint.read_expert(layer, e, p)) for e in range(EXPERTS)]
                )
                for p in ("gate", "up", "down")
            )
            experts = model.model.layers[layer].mlp.experts
            if name == "gpt_oss":  # [E, H, 2I], gate and up interleaved, and [E, I, H]
                gate_up = torch.stack([gate, up], dim=2).flatten(1, 2).transpose(1, 2)
                down = down.transpose(1, 2)
            else:
                gate_up = torch.cat([gate, up], dim=1)
            experts.gate_up_proj.data.copy_(gate_up)
            experts.down_proj.data.copy_(down)
        return model

    return make


@pytest.fixture(scope="session")
def prompt():
    """[3, 11] ids, none of them special."""
    return torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
