from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moequant.dialects.names import ModulePatterns, NamePatterns, expert_block, kept_blocks
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
    assert ModulePatterns.among(formats).of_formats(formats) == {
        "nvfp4": [r"re:(?:.*\.)?layers\.\d+\.mlp\.experts\.\d+\.[^.]+$"],
        "fp8_block": [r"re:(?:.*\.)?layers\.\d+\.mlp\.shared_expert[s]\.[^.]+$"],
    }


def test_formats_told_apart_by_layer_need_one_pattern_a_layer():
    formats = {"layers.0.experts.5.up": "a", "layers.11.experts.5.up": "b", "layers.1.o": "b"}
    assert ModulePatterns.among(formats).of_formats(formats) == {
        "a": [r"re:(?:.*\.)?layers\.0\.experts\.\d+\.[^.]+$"],
        "b": [
            r"re:(?:.*\.)?layers\.11\.experts\.\d+\.[^.]+$",
            r"re:(?:.*\.)?layers\.\d+\.[^.]+$",
        ],
    }


def test_formats_told_apart_by_name_need_whole_names():
    formats = {"layers.0.q": "a", "layers.0.o": "b"}
    assert ModulePatterns.among(formats).of_formats(formats) == {
        "a": ["layers.0.q"],
        "b": ["layers.0.o"],
    }


MAPPERS = {
    "none": {},
    "Qwen3.5": {"model.language_model.": "language_model.model.", "model.visual.": "visual."},
    "DeepSeek-V4": {"layers.": "model.layers.", "mtp.": "model.mtp."},
    "Nemotron-H": {"backbone.": "model."},
}


def renamed(name, mapper):
    """A module, or an entry of a list, as vLLM's WeightsMapper renames it by its prefix."""
    for old, new in mapper.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize("mapper", MAPPERS.values(), ids=MAPPERS)
@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "backbone.", ""])
def test_lists_hold_for_modules_that_an_engine_calls_otherwise(mapper, prefix):
    experts = [f"{prefix}layers.{i}.mlp.experts.{e}.up_proj" for i in range(3) for e in range(2)]
    shared = [f"{prefix}layers.{i}.mlp.shared_experts.up_proj" for i in range(3)]
    formats = dict.fromkeys(experts[2:], "nvfp4") | dict.fromkeys(shared, "fp8_block")
    # Kept: the first layer's experts, those of multi-token prediction, a part of the vision tower.
    main, mtp = f"{prefix}layers.0.mlp.experts", "mtp.layers.1.mlp.experts"
    others = [f"{prefix}layers.0.self_attn.o_proj", "model.visual.blocks.1.attn.proj"]
    patterns = ModulePatterns.among((*formats, main, mtp, *others))
    ignored = [*others, patterns.of_block(main), patterns.of_block(mtp)]
    ignored = NamePatterns([renamed(name, mapper) for name in ignored], "ignore")
    for module in (*others, f"{main}.0.w1", f"{main}.9.up_proj"):
        assert ignored.first_match(renamed(module, mapper)) is not None, module
    # vLLM asks for them by the prefix `mtp`.
    assert ignored.first_match(f"{mtp}.0.up_proj") is not None
    for module in formats:
        assert ignored.first_match(renamed(module, mapper)) is None, module
    for format, targets in patterns.of_formats(formats).items():
        found = NamePatterns([renamed(name, mapper) for name in targets], "targets")
        matched = [m for m in formats if found.first_match(renamed(m, mapper)) is not None]
        assert matched == [m for m in formats if formats[m] == format]


def test_a_module_without_a_prefix_is_told_from_one_with_it():
    modules = [f"model.layers.0.mlp.experts.{e}.up" for e in range(2)]
    patterns = ModulePatterns.among([*modules, "layers.0.mlp.experts"])
    ignored = NamePatterns([patterns.of_block("layers.0.mlp.experts")], "ignore")
    assert [ignored.first_match(m) for m in (*modules, "layers.0.mlp.experts.1.up")] == [
        None, None, 0,
    ]  # fmt: skip
    targets = NamePatterns(patterns.of_formats(dict.fromkeys(modules, "a"))["a"], "targets")
    assert targets.first_match("language_model.layers.0.mlp.experts.1.up") == 0
    assert targets.first_match("layers.0.mlp.experts.1.up") is None


def test_a_prefix_that_tells_modules_apart_stays_in_the_patterns():
    thinker, talker = (f"{part}.model.layers.0.mlp.experts" for part in ("thinker", "talker"))
    attention = "thinker.model.layers.1.self_attn.o_proj"
    patterns = ModulePatterns.among([thinker, talker, attention])
    assert patterns.of_block(thinker) == (
        r"re:(?!talker\.model\.layers\.)(?:.*\.)?layers\.0\.mlp\.experts\."
    )
    assert patterns.of_block(talker) == r"re:talker\.model\.layers\.0\.mlp\.experts\."
    assert patterns.of_formats({attention: "nvfp4"}) == {
        "nvfp4": [r"re:(?:.*\.)?layers\.\d+\.self_attn\.[^.]+$"]
    }


names = st.builds(
    "model.layers.{}.{}.{}".format,
    st.integers(0, 12),
    st.sampled_from(["mlp.experts.0", "mlp.experts.11", "mlp", "mlp.shared_experts", "self_attn"]),
    st.sampled_from(["up", "down"]),
)


@given(st.dictionaries(names, st.sampled_from("abc"), min_size=1))
def test_every_module_is_targeted_by_its_own_format_alone(formats):
    patterns = ModulePatterns.among(formats).of_formats(formats)
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
