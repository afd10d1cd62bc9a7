from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moequant.dialects.names import NamePatterns, expert_block, kept_blocks, target_patterns
from moequant.errors import CheckpointError


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("model.layers.3.mlp.experts.7.down_proj", "model.layers.3.mlp.experts"),
        ("model.layers.3.block_sparse_moe.experts.0.w1", "model.layers.3.block_sparse_moe.experts"),
        ("model.layers.3.mlp.shared_experts.down_proj", None),
        ("model.layers.3.mlp.gate", None),
        ("experts.0.w1", None),
    ],
)
def test_expert_block_is_what_engines_run_as_one_module(module, block):
    assert expert_block(module) == block


def test_kept_experts_become_one_entry_and_lm_head_is_always_there():
    kept = ["b.q_proj", "a.experts.1.w1", "a.experts.0.w1"]
    assert kept_blocks(kept) == (["a.experts"], ["b.q_proj", "lm_head"])
    assert kept_blocks([*kept, "mtp.experts"]) == (
        ["a.experts", "mtp.experts"],
        ["b.q_proj", "lm_head"],
    )


def test_formats_told_apart_by_parent_need_one_pattern_for_all_layers():
    formats = {f"model.layers.{i}.mlp.experts.{e}.up_proj": "nvfp4" for i in (0, 1) for e in (0, 1)}
    formats |= {f"model.layers.{i}.mlp.shared_experts.up_proj": "fp8_block" for i in (0, 1)}
    assert target_patterns(formats) == {
        "nvfp4": [r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.[^.]+$"],
        "fp8_block": [r"re:model\.layers\.\d+\.mlp\.shared_expert[s]\.[^.]+$"],
    }


def test_formats_told_apart_by_layer_need_one_pattern_a_layer():
    formats = {"layers.0.experts.5.up": "a", "layers.11.experts.5.up": "b", "layers.1.o": "b"}
    assert target_patterns(formats) == {
        "a": [r"re:layers\.0\.experts\.\d+\.[^.]+$"],
        "b": [r"re:layers\.11\.experts\.\d+\.[^.]+$", r"re:layers\.\d+\.[^.]+$"],
    }


def test_formats_told_apart_by_name_need_whole_names():
    assert target_patterns({"layers.0.q": "a", "layers.0.o": "b"}) == {
        "a": ["layers.0.q"],
        "b": ["layers.0.o"],
    }


names = st.builds(
    "model.layers.{}.{}.{}".format,
    st.integers(0, 12),
    st.sampled_from(["mlp.experts.0", "mlp.experts.11", "mlp", "mlp.shared_experts", "self_attn"]),
    st.sampled_from(["up", "down"]),
)


@given(st.dictionaries(names, st.sampled_from("abc"), min_size=1))
def test_every_module_is_targeted_by_its_own_format_alone(formats):
    patterns = target_patterns(formats)
    lookups = {f: NamePatterns(found, "here") for f, found in patterns.items()}
    for module, format in formats.items():
        assert [f for f in lookups if lookups[f].first_match(module) is not None] == [format]


def test_the_first_pattern_wins_be_it_a_name_or_a_regex():
    patterns = NamePatterns(["re:.*q_proj", "a.q_proj", "b", "re:b"], "here")
    assert patterns.first_match("a.q_proj") == 0
    assert patterns.first_match("b") == 2
    assert patterns.first_match("bc") == 3
    assert patterns.first_match("a.k_proj") is None


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "*", "(?P<x>"])
def test_a_broken_regex_is_refused_with_its_place(pattern):
    with pytest.raises(CheckpointError, match=f"ignore: .*{re.escape(repr(pattern)[1:-1])}"):
        NamePatterns([f"re:{pattern}"], "quantization_config.ignore")
