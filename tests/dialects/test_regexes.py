from __future__ import annotations

import time

import pytest

from moequant.dialects.regexes import compile_regex

NAME = "model.layers.17.mlp.experts.103.gate_proj.weight_scale_inv"
# As releases and recipes of other tools have them, and as we write them.
REAL = (
    r".*self_attn.*",
    r".*mlp\.gate$",
    r".*mlp.gate$",
    r"model\.layers\.\d+\..*",
    r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
    r"model\.layers\.\d+\.mlp\.experts\.\d+\.[^.]+$",
    rf"(?:model\.)?layers\.({'|'.join(map(str, range(61)))})\.mlp\..*\.(gate|up|down)_proj",
    r"^(?!.*mlp\.experts)(?!.*shared)(?!lm_head).*_proj$",
    r"(?P<block>.+\.experts)\.\d+\.(?:w1|w2|w3)",
    r"layers\.[0-9]{1,2}\.[]*+a-z_^]{2,}",
    r"\(\*\)\[\*\*\*\*\*\*\*\*",
    r"(?i)LM_HEAD(?#**********)",
    r"(?:ab)+(?=c*+)a{,}?\N{DIGIT ONE}{}{x}",
)
HOSTILE = (
    r"(.*.*)*[^.]X",
    r"(?:.*.*)+?[^.]X",
    r"(?P<n>.*.*){2,}[^.]X",
    r"(?:.*.*){,}[^.]X",
    r"(?>(?:.*.*)*[^.]X)",
    r"(?=(.*.*)*[^.]X)",
    r"(?i:.*.*)*[^.]X",
    r"(?:.*.*)(?#x)*[^.]X",
    r"(?x)(?: .*.* #[" "\n" r")* [^.]X",
    r"(?is-m:(?x:(?: .*.* #[" "\n" r")* [^.]X))",
    r"(?:[a-z.]|[a-z.0-9])*+[^.]X",
    r"(?:.?.?)*[^.]X",
    r"(?:.{1,2})*[^.]X",
    r"(?:.{1,2}){60}[^.]X",
    r"(?:(?:(?:.{9}){9}){9}){9}",
    r"(?:(?:){60000}){60000}",
    r"()(?:(?(1).|..))*[^.]X",
    r"[]](.*.*)*[^.]X|\](.*.*)*[^.]X",
    ".*" * 5 + "X",
    r"(.+)\1X",
    r"(?P<n>.+)(?P=n)X",
    ".?" * 30 + "." * 30 + "[^.]X",
    "(.|.)" * 30 + "[^.]X",
    r"(?:(a)|\1(.*.*))*[^.]X",
)


@pytest.mark.parametrize("pattern", REAL)
def test_patterns_of_real_configs_are_taken_and_quick(pattern):
    began = time.process_time()
    for _ in range(100):
        compile_regex(pattern).match(NAME)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("pattern", HOSTILE)
def test_what_could_match_for_hours_is_refused_at_once(pattern):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"in so many ways .* at most 4 of .* simple ones"):
        compile_regex(pattern)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "a{" + "9" * 5000 + "}"])
def test_what_is_no_regular_expression_is_refused_in_few_words(pattern):
    with pytest.raises(ValueError, match="is no regular expression") as error:
        compile_regex(pattern)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("times", ["*", "+", "*?", "++", "{3,}", "{,}", "{3,}?"])
def test_four_endless_repetitions_are_taken_and_five_are_not(times):
    compile_regex(f"[a-z]{times}" * 4)
    with pytest.raises(ValueError, match="in so many ways"):
        compile_regex(f"[a-z]{times}" * 5)
