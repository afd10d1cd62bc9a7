"""The rules about engines, and what is said by them."""

from __future__ import annotations

import pytest

from moequant.compatibility import Facts, judge, warnings_of
from moequant.compatibility.facts import UNQUANTIZED, Placement
from moequant.compatibility.rules import _CONDITIONS, _read, rules
from moequant.compatibility.tables import read_table
from moequant.dialects import REGISTRY
from moequant.formats import REGISTRY as FORMATS
from moequant.models import architectures

PAIRS = [(d, f) for d, dialect in REGISTRY.items() for f in dialect.carried]


def written(dialect, *experts, formats=(), **settings):
    sizes = {"hidden": 512, "intermediate": 256}
    return Facts(
        dialect=dialect,
        formats=frozenset(formats),
        experts=experts,
        **{"model_type": "qwen3_moe", "some_kept": False, **sizes} | settings,
    )


def loading(checkpoint):
    """Whether each engine loads it."""
    return {v.engine: v.loads for v in judge(checkpoint)}


def test_rules_name_what_is_there():
    known = {model_type for a in architectures() for model_type in a.model_types}
    for rule in rules():
        assert {*rule.dialects} <= REGISTRY.keys() | {UNQUANTIZED}
        assert {*rule.formats} <= FORMATS.keys()
        assert {*rule.model_types, *rule.other_model_types} <= known


def test_every_rule_has_a_source_and_a_version_and_what_to_do():
    own = {"moequant"}
    for rule in rules():
        texts = [text for text in (rule.why, rule.next, rule.caution) if text]
        assert all(text.endswith((".", ").")) for text in texts), rule.id
        assert rule.loads or rule.next, rule.id
        assert rule.source, rule.id
        if rule.known == "read" and not {*rule.engines} <= own and rule.id != "unquantized":
            versions = ("vllm 0.33.0", "sglang 0.5.23", "transformers 5.24.0", "the formats:")
            assert any(version in rule.source for version in versions), rule.id


@pytest.mark.parametrize(("dialect", "format"), PAIRS)
def test_every_engine_has_a_word_about_every_pair(dialect, format):
    verdicts = judge(written(dialect, format))
    assert [verdict.engine for verdict in verdicts] == ["transformers", "vLLM", "SGLang"]
    for verdict in verdicts:
        assert verdict.loads is not None
        assert verdict.known is not None
        assert verdict.loads == (not verdict.why)


@pytest.mark.parametrize(
    ("checkpoint", "transformers", "vllm", "sglang"),
    [
        (written("fp8", "fp8_block"), True, True, True),
        (written("fp8", "fp8_block", ragged=True), False, True, True),
        (written("compressed-tensors", "mxfp4", ragged=True), True, True, False),
        (written("compressed-tensors", "fp8_block"), False, True, True),
        (written("compressed-tensors", "nvfp4"), False, True, True),
        (written("compressed-tensors", "mxfp4"), True, True, False),
        (written("compressed-tensors", "w4a8"), True, True, True),
        (written("compressed-tensors", "w4a8", hidden=128, intermediate=384), True, False, True),
        (written("compressed-tensors", "w4a8", dtype="float16"), True, False, True),
        (written("compressed-tensors", "w4a8", dtype="bfloat16"), True, True, True),
        (written("compressed-tensors", "w4a8", some_kept=True), False, True, True),
        (written("compressed-tensors", "mxfp4", "w4a8"), False, True, False),
        (written("gpt-oss", "mxfp4"), True, True, True),
        (written("gpt-oss", "mxfp4", some_kept=True), True, False, False),
        (written("modelopt", "nvfp4"), False, True, True),
        (written("modelopt", formats=["nvfp4"]), False, None, None),
        (written("modelopt", "fp8_tensor", static=True), False, True, True),
        (written("modelopt", "fp8_tensor"), False, False, False),
        (written("modelopt", "nvfp4", formats=["fp8_tensor"]), False, True, True),
        (written("modelopt", "nvfp4", "fp8_tensor", static=True), False, True, True),
        (written("fp8-ue8m0", "fp8_block"), True, True, True),
        (written("fp8-ue8m0", "mxfp4"), True, False, True),
        (written("fp8-ue8m0", "mxfp4", hidden=144), True, False, False),
        (written("fp8-ue8m0", "mxfp4", model_type="llama4"), False, False, True),
        (written("fp8", "fp8_block", model_type="deepseek_v4"), True, False, False),
        (written("deepseek-v4", "mxfp4", model_type="deepseek_v4"), True, True, True),
        (written("deepseek-v4", "fp8_block", model_type="deepseek_v4"), True, True, True),
        (written("deepseek-v4", "mxfp4", some_kept=True), True, False, False),
        (written("deepseek-v4", "mxfp4", intermediate=144), True, False, False),
        (written("w4afp8", "w4a8"), False, False, True),
        (written("w4afp8", "w4a8", some_kept=True), False, False, False),
        (written("moequant", "mxfp4"), False, False, False),
        (written("moequant", formats=["mxfp4"]), False, False, False),
        (written("fp8", "fp8_block", model_type="llama4"), False, True, True),
        (written("fp8", "fp8_block", model_type="phimoe"), True, True, True),
        (written("compressed-tensors", "mxfp4", not_loaded="why"), False, True, False),
        (written("fp8", "fp8_block", not_loaded="why"), True, True, True),
    ],
)
def test_what_loads_what(checkpoint, transformers, vllm, sglang):
    assert loading(checkpoint) == {"transformers": transformers, "vLLM": vllm, "SGLang": sglang}


@pytest.mark.parametrize("dialect", ["fp8", "compressed-tensors", "gpt-oss"])
def test_without_experts_nothing_is_known_and_nothing_said(dialect):
    checkpoint = written(dialect, formats=["fp8_block", "mxfp4"], some_kept=True)
    assert set(loading(checkpoint).values()) == {None}
    assert warnings_of(judge(checkpoint)) == []


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (written("compressed-tensors", "nvfp4"), ["global scale"]),
        (written("compressed-tensors", "mxfp4"), ["all zero"]),
        (
            written("compressed-tensors", "fp8_block"),
            ["fails to load FP8 block experts in this dialect. The dialect fp8 loads"],
        ),
        (
            written("compressed-tensors", "fp8_block", formats=["nvfp4"]),
            ["fails to load FP8 block experts in this dialect."],
        ),
        (
            written("compressed-tensors", "fp8_block", "w4a8", hidden=128, intermediate=384),
            ["fails to load FP8", "more than one", "multiples of 256"],
        ),
        (written("compressed-tensors", "w4a8", dtype="float16"), ["--dtype bfloat16"]),
        (written("fp8", "fp8_block", model_type="deepseek_v3"), []),
        (
            written("fp8", "fp8_block", model_type="deepseek_v3", shared_apart=True),
            ["--disable-shared-experts-fusion"],
        ),
        (written("fp8", "fp8_block", shared_apart=True), []),
        (written("compressed-tensors", "mxfp4", dtype="float16"), ["all zero"]),
        (written("modelopt", "nvfp4"), ["stops at their size", "--moe-runner-backend marlin"]),
        (
            written("modelopt", "nvfp4", "fp8_tensor", static=True),
            [
                "stops at their size",
                "one static scale for a layer",
                "one static scale for a layer",
                "NVFP4 experts without activation scales",
            ],
        ),
        (written("moequant", "mxfp4"), ["random experts", "vLLM 0.33 refuses", "SGLang"]),
        (
            written("compressed-tensors", "w4a8", not_loaded="supports only stacked experts"),
            ["this model in this dialect: supports only stacked experts. vLLM"],
        ),
    ],
)
def test_what_goes_wrong_is_said_once(checkpoint, said):
    sentences = warnings_of(judge(checkpoint))
    assert len(sentences) == len(said)
    assert all(part in sentence for part, sentence in zip(said, sentences, strict=True))


def test_a_hint_at_another_dialect_is_left_out_where_that_holds_not_all_formats():
    (message,) = warnings_of(judge(written("compressed-tensors", "fp8_block", formats=["nvfp4"])))
    assert "dialect fp8" not in message


@pytest.mark.parametrize(("dialect", "format"), PAIRS)
def test_of_a_model_that_a_user_describes_only_what_fails_is_known(dialect, format):
    ours = judge(written(dialect, format))
    theirs = judge(written(dialect, format, described=True))
    assert [v.loads for v in theirs] == [None if v.loads else False for v in ours]
    assert [v.known for v in theirs] == [None if v.loads else v.known for v in ours]
    assert warnings_of(theirs) == warnings_of(ours)


FLASHINFER, MARLIN = (f"--moe-runner-backend {name}" for name in ("flashinfer_mxfp4", "marlin"))


@pytest.mark.parametrize(
    ("checkpoint", "capability", "options"),
    [
        (written("fp8-ue8m0", "mxfp4"), None, (FLASHINFER,)),
        (written("fp8-ue8m0", "mxfp4"), (9, 0), (FLASHINFER,)),
        (written("fp8-ue8m0", "mxfp4", intermediate=192), (9, 0), (MARLIN,)),
        (written("fp8-ue8m0", "mxfp4", intermediate=192), (10, 0), (FLASHINFER,)),
        (written("fp8-ue8m0", "mxfp4", intermediate=192), (12, 0), (MARLIN,)),
        # It stops at the size, so no option helps.
        (written("fp8-ue8m0", "mxfp4", intermediate=48), (9, 0), ()),
        # SGLang chooses the kernel of these models itself.
        (written("fp8-ue8m0", "mxfp4", model_type="deepseek_v4"), (9, 0), ()),
        (written("fp8-ue8m0", "mxfp4", model_type="mimo_v2_flash"), (9, 0), ()),
        (written("fp8-ue8m0", "mxfp4", model_type="mimo_v2_flash"), (12, 0), (FLASHINFER,)),
        (written("fp8-ue8m0", "fp8_block"), (9, 0), ()),
        (
            written("fp8-ue8m0", "mxfp4", model_type="deepseek_v3", shared_apart=True),
            (10, 0),
            (FLASHINFER, "--disable-shared-experts-fusion"),
        ),
    ],
)
def test_options_that_sglang_needs(checkpoint, capability, options):
    (verdict,) = judge(checkpoint, Placement(capability=capability), ["sglang"])
    assert verdict.options == options
    assert (verdict.loads is True) == (not verdict.against)


def test_options_are_of_rules_that_load_and_an_option_each():
    having = [rule for rule in rules() if rule.options]
    assert having
    for rule in having:
        assert rule.loads, rule.id
        for option in rule.options:
            assert option.startswith("--"), rule.id
            assert len(option.split()) <= 2, rule.id


def test_a_format_helps_nothing_where_config_json_is_what_is_not_loaded():
    about = {rule.id: rule for rule in rules() if rule.is_about_model}
    assert {"act-fn", "act-fn-serving", "other-architectures", "no-architectures-vllm"} <= {*about}
    assert {rule.id for rule in rules() if rule.lacks} <= {*about}
    # What is stored, and where it runs, are other things.
    others = {"unquantized-own", "rows-of-a-rank", "expert-ranks-vllm", "not-finite-config"}
    assert not others & {*about}
    assert not any(rule.loads or rule.dialects or rule.defect for rule in about.values())


def test_every_condition_of_a_rule_is_known():
    named = {rule.when for rule in rules() if rule.when}
    assert named <= _CONDITIONS.keys()
    (entry,) = (e for e in read_table("rules.toml")["rule"] if e["id"] == "act-fn")
    with pytest.raises(AssertionError, match="moon"):
        _read({**entry, "when": "moon is full"})
