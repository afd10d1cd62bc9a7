"""By hand; what engines and transformers allocate, tests of `compatibility.kv_cache` compare."""

from __future__ import annotations

from math import inf

import pytest

from moequant.errors import CheckpointError
from moequant.models.cached_numbers import numbers_of_heads, numbers_of_latent, tokens_kept

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 6, "head_dim": 128, "hidden_size": 2048}


@pytest.mark.parametrize(
    ("change", "ranks", "numbers"),
    [
        ({}, 1, 2 * 6 * 128),
        ({}, 2, 2 * 3 * 128),
        ({}, 4, 2 * 2 * 128),  # two ranks have two heads
        ({}, 8, 2 * 1 * 128),
        ({"num_key_value_heads": None}, 1, 2 * 32 * 128),
        ({"head_dim": None}, 1, 2 * 6 * 64),
    ],
)
def test_a_token_has_a_key_and_a_value_of_every_head_of_a_rank(change, ranks, numbers):
    assert numbers_of_heads(HEADS | change, ranks) == numbers


@pytest.mark.parametrize(
    ("rope", "numbers"),
    [({"qk_rope_head_dim": 64}, 576), ({"qk_rope_head_dim": 0}, 512), ({}, 512)],
)
def test_a_latent_token_has_its_vector_and_a_rotary_key_if_there_is_one(rope, numbers):
    assert numbers_of_latent({"kv_lora_rank": 512} | rope) == numbers


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"sliding_window": 8}, [inf] * 4),  # models say differently what it means
        ({"layer_types": None}, [inf] * 4),
        ({"layer_types": ["sliding_attention"] * 4}, [inf] * 4),
        (
            {
                "layer_types": ["sliding_attention", "full_attention", "mamba", "of_tomorrow"],
                "sliding_window": 8,
            },
            [8, inf, 0, inf],
        ),
        ({"layer_types": ["chunked_attention"] * 6, "attention_chunk_size": 16}, [16] * 4),
        ({"layer_types": ["full_attention", {}]}, [inf] * 2),
    ],
)
def test_a_layer_keeps_the_tokens_of_its_window(section, kept):
    assert tokens_kept(section, 4) == kept


@pytest.mark.parametrize("value", [-1, "4", 2.0, True, [4]])
@pytest.mark.parametrize(
    ("read", "section", "key"),
    [
        (numbers_of_heads, HEADS, "num_key_value_heads"),
        (numbers_of_heads, HEADS, "head_dim"),
        (numbers_of_heads, HEADS | {"head_dim": None}, "hidden_size"),
        (numbers_of_latent, {"qk_rope_head_dim": 64}, "kv_lora_rank"),
        (lambda section: tokens_kept(section, 1), {"layer_types": []}, "sliding_window"),
    ],
)
def test_a_size_that_is_no_positive_integer_is_refused_by_name(read, section, key, value):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} is .*a positive integer"):
        read(section | {key: value})
