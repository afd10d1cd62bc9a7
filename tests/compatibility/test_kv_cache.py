"""Bytes of KV cache a token, by hand and as transformers allocates them."""

from __future__ import annotations

import pytest

from moequant.compatibility.kv_cache import KvCache, kv_cache

QWEN = {
    "model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "hidden_size": 2048, "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers", "tp", "expected"),
    [
        (QWEN, 48, 1, 48 * 2 * 4 * 128 * 2),  # 98304
        (QWEN, 48, 4, 48 * 2 * 1 * 128 * 2),
        (QWEN, 48, 8, 48 * 2 * 1 * 128 * 2),  # a copy on two ranks each
        (QWEN | {"num_key_value_heads": 3}, 1, 2, 2 * 2 * 128 * 2),  # the larger share
        (QWEN | {"torch_dtype": "float32"}, 48, 1, 48 * 2 * 4 * 128 * 4),
        (QWEN | {"head_dim": None}, 48, 1, 48 * 2 * 4 * 64 * 2),
        (DEEPSEEK, 61, 1, 70_272),  # 61 x (512 + 64) x 2
        (DEEPSEEK, 61, 8, 70_272),
        ({"model_type": "x", "text_config": QWEN}, 48, 1, 98_304),
        (QWEN | {"sliding_window": 4096, "use_sliding_window": False}, 48, 1, 98_304),
    ],
)
def test_bytes_of_a_token_are_those_computed_by_hand(config, layers, tp, expected):
    assert kv_cache(config, layers, tp) == KvCache(token_bytes=expected)


def test_layers_with_a_window_keep_only_its_tokens():
    config = {
        **QWEN, "model_type": "gpt_oss", "head_dim": 64, "num_key_value_heads": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
    }  # fmt: skip
    half = 12 * 2 * 8 * 64 * 2
    expected = KvCache(token_bytes=half, window_token_bytes=half, window=128)
    assert kv_cache(config, 24, 1) == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        QWEN | {"model_type": "qwen3_next"},
        QWEN | {"num_attention_heads": "32", "num_key_value_heads": None},
        QWEN | {"num_key_value_heads": -1},
        QWEN | {"head_dim": "128"},
        QWEN | {"sliding_window": 4096},
        QWEN | {"layer_types": ["full_attention"]},
        QWEN | {"layer_types": ["linear_attention"] * 48},
        QWEN | {"layer_types": [{}] * 48},
        QWEN | {"layer_types": ["sliding_attention"] * 48},
        QWEN | {"torch_dtype": "float8_e4m3fn"},
        DEEPSEEK | {"kv_lora_rank": -1},
        DEEPSEEK | {"qk_rope_head_dim": None},
        DEEPSEEK | {"qk_rope_head_dim": 0},
        DEEPSEEK | {"index_head_dim": 128},
    ],
)
def test_what_config_json_does_not_say_is_not_known(config):
    assert kv_cache(config, 48, 1) is None


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "olmoe"])
def test_transformers_allocates_as_many_bytes_a_token(model_type):
    """The cache of its own class after five tokens, all of them within any window."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=64, intermediate_size=32, moe_intermediate_size=32,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=2, num_experts=2, n_routed_experts=2, num_experts_per_tok=1,
        vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=1, layer_types=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=True).past_key_values
    allocated = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    found = kv_cache({**config.to_dict(), "dtype": "float32"}, 4, 1)
    assert found is not None
    assert 5 * (found.token_bytes + found.window_token_bytes) == allocated
