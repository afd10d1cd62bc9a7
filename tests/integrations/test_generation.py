from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from moequant.errors import CheckpointError, NumericsError, UnsupportedError
from moequant.integrations.generation import generate
from moequant.integrations.generation_settings import unused_settings
from moequant.integrations.prompt_tokenizer import PromptTokenizer
from moequant.integrations.transformers import load_model


@pytest.fixture(scope="module")
def model(converted):
    return load_model(converted("mixtral", "mxfp4"))


def test_the_likeliest_tokens_are_those_of_the_model_itself(model):
    with torch.no_grad():
        ids = [5, 6, 7]
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    found = generate(model, [5, 6, 7], max_new_tokens=4)
    assert found.ids == ids[3:]
    assert found.first_token_s > 0
    assert found.tokens_per_s > 0


def test_a_single_token_has_no_rate(model):
    found = generate(model, [5], max_new_tokens=1)
    assert len(found.ids) == 1
    assert found.tokens_per_s is None


def test_what_generation_config_says_of_drawing_is_of_no_use_to_the_likeliest(model, caplog):
    before = model.generation_config
    model.generation_config = type(before)(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    try:
        drawn = generate(model, [5, 6, 7], max_new_tokens=4)
    finally:
        model.generation_config = before
    assert drawn.ids == generate(model, [5, 6, 7], max_new_tokens=4).ids
    assert not caplog.records


def test_the_same_seed_draws_the_same_and_leaves_the_generator_alone(model):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    options = {"max_new_tokens": 8, "temperature": 5.0}
    first, again, other = (generate(model, [5], **options, seed=s).ids for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_choose_no_token_end_it_at_that_token(model, temperature, value):
    seen = []

    def break_the_third(_module, _inputs, logits):
        seen.append(logits)
        return torch.where(torch.arange(96) == 7, value, logits) if len(seen) == 3 else logits

    hook = model.lm_head.register_forward_hook(break_the_third)
    try:
        with pytest.raises(NumericsError, match=r"the logits of new token 3 have NaN or Inf"):
            generate(model, [5, 6], max_new_tokens=8, temperature=temperature)
    finally:
        hook.remove()
    assert len(seen) == 3


@pytest.fixture
def with_settings(model):
    """with_settings(**fields): the model with these in its generation_config.json."""
    before = model.generation_config

    def set_(**fields):
        model.generation_config = type(before).from_dict(fields)
        return model

    yield set_
    model.generation_config = before


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 2},
        {"guidance_scale": 2.0},
        {"repetition_penalty": 1.3},
        {"max_time": 1e-6},
        {"use_cache": False},
        {"return_dict_in_generate": True},
        {"stop_strings": ["x"]},
        {"forced_eos_token_id": 99999},
        {"max_length": 2, "min_length": 90},
        {"dola_layers": "high"},
    ],
    ids=str,
)
def test_other_settings_do_not_change_the_likeliest_tokens(model, with_settings, fields):
    expected = generate(model, [5, 6, 7], max_new_tokens=6).ids
    given = with_settings(**fields)
    before = given.generation_config
    assert generate(given, [5, 6, 7], max_new_tokens=6).ids == expected
    assert given.generation_config is before


def test_settings_that_are_not_used_are_named(with_settings):
    said = {
        "num_beams": 4, "max_time": 3.0, "eos_token_id": 2, "top_p": 0.9, "do_sample": True,
        "repetition_penalty": 1.1, "length_penalty": 1.0, "output_attentions": False,
    }  # fmt: skip
    given = with_settings(**said)
    assert unused_settings(given, 1.0) == ["max_time", "num_beams"]
    assert unused_settings(given, 0.0) == ["max_time", "num_beams", "repetition_penalty"]
    neutral = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
    assert unused_settings(with_settings(**neutral), 0.0) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("top_k", -2, "top_k is -2, but must be a whole number, 0 or -1 for all tokens; correct"),
        ("top_p", 0, "top_p is 0, but must be a number above 0, at most 1"),
        ("repetition_penalty", -1, "repetition_penalty is -1, but must be a number above 0"),
    ],
)
def test_a_wrong_setting_of_sampling_is_refused_where_it_counts(with_settings, field, value, said):
    given = with_settings(do_sample=True)
    setattr(given.generation_config, field, value)
    assert generate(given, [5, 6, 7], max_new_tokens=2).ids
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {said}"):
        generate(given, [5, 6, 7], max_new_tokens=2, temperature=1.0)


def test_a_top_k_that_takes_all_tokens_may_be_written_as_vllm_does(model, with_settings):
    options = {"max_new_tokens": 6, "temperature": 5.0}
    every = generate(with_settings(do_sample=True, top_k=0), [5, 6, 7], **options).ids
    assert generate(with_settings(do_sample=True, top_k=-1), [5, 6, 7], **options).ids == every


def test_a_setting_of_sampling_counts_where_tokens_are_sampled(model, with_settings):
    # Behind the third, two tokens are equally likely.
    likeliest = generate(model, [5, 6, 7], max_new_tokens=3).ids
    options = {"max_new_tokens": 3, "temperature": 9.0}
    assert generate(model, [5, 6, 7], **options).ids != likeliest
    assert generate(with_settings(do_sample=True, top_k=1), [5, 6, 7], **options).ids == likeliest


def test_a_cache_that_config_json_turns_off_is_used(model, monkeypatch):
    expected = generate(model, [5, 6, 7], max_new_tokens=6).ids
    monkeypatch.setattr(model.config, "use_cache", False)
    assert generate(model, [5, 6, 7], max_new_tokens=6).ids == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", r"holds \[1\], but must be a JSON object; correct it"),
        ("{", "not valid JSON: .*; correct it"),
        ('{"eos_token_id": []}', r"eos_token_id is \[\], but must be a token id"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x', but must be a token id"),
        ('{"eos_token_id": -1}', "eos_token_id is -1, but must be a token id"),
        ('{"suppress_tokens": "x"}', "suppress_tokens is 'x', but must be a list of token ids"),
        ('{"bad_words_ids": [5]}', r"bad_words_ids is \[5\], but must be a list of lists of token"),
        ('{"compile_config": 5}', "transformers .* cannot read it: .*; correct it, or remove it"),
    ],
)
def test_a_wrong_file_of_settings_is_refused_before_weights_are_read(
    converted, tmp_path, monkeypatch, text, said
):
    path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "c")
    (path / "generation_config.json").write_text(text)
    monkeypatch.setattr(
        "moequant.integrations.transformers._build", lambda *_, **__: pytest.fail("weights")
    )
    with pytest.raises(CheckpointError, match=f"generation_config.json: {said}"):
        load_model(path)


def test_excluded_tokens_are_not_taken_for_a_fault(model):
    first, *_ = generate(model, [5, 6, 7], max_new_tokens=1).ids
    before = model.generation_config.suppress_tokens
    model.generation_config.suppress_tokens = [first]
    try:
        assert generate(model, [5, 6, 7], max_new_tokens=1).ids != [first]
    finally:
        model.generation_config.suppress_tokens = before


def test_an_end_ends_it(model):
    first, *_ = generate(model, [5, 6, 7], max_new_tokens=1).ids
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = first
    try:
        assert generate(model, [5, 6, 7], max_new_tokens=9).ids == [first]
    finally:
        model.generation_config.eos_token_id = before


def test_wrong_numbers_are_refused_by_name(model):
    with pytest.raises(UnsupportedError, match="max_new_tokens is 0"):
        generate(model, [5], max_new_tokens=0)
    with pytest.raises(UnsupportedError, match="the prompt has no tokens"):
        generate(model, [], max_new_tokens=1)
    for seed in (-1, 1 << 64):
        with pytest.raises(UnsupportedError, match=f"seed is {seed}"):
            generate(model, [5], max_new_tokens=1, seed=seed)
    for temperature in (-1.0, 1e-320, float("nan"), float("inf")):
        with pytest.raises(UnsupportedError, match=f"temperature is {temperature}"):
            generate(model, [5], max_new_tokens=1, temperature=temperature)


def test_the_coldest_temperature_and_the_largest_seed_draw_the_likeliest(model):
    drawn = generate(model, [5], max_new_tokens=3, temperature=1e-6, seed=(1 << 64) - 1)
    assert drawn.ids == generate(model, [5], max_new_tokens=3).ids


def test_ids_outside_the_vocabulary_are_refused_by_name(converted):
    tokenizer = PromptTokenizer.of(converted("mixtral", "mxfp4"))
    tokenizer.check([0, 95])
    for ids, message in (
        ([3, 96], "id 96 is not in .* 0 to 95"),
        ([-1], "id -1"),
        ([], "no tokens"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            tokenizer.check(ids)


def test_text_without_a_tokenizer_is_refused(converted, tmp_path):
    tokenizer = PromptTokenizer.of(converted("mixtral", "mxfp4"))
    with pytest.raises(UnsupportedError, match=r"no tokenizer; copy .*, or give .* --prompt-ids"):
        tokenizer.encode("hello")
    path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "converted")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="cannot read the tokenizer"):
        PromptTokenizer.of(path).encode("hello")


def test_a_config_without_a_vocabulary_is_refused(converted, tmp_path):
    path = shutil.copytree(converted("mixtral", "mxfp4"), tmp_path / "converted")
    config = json.loads((path / "config.json").read_text())
    del config["vocab_size"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vocab_size is None"):
        PromptTokenizer.of(path)


on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_compiled_steps_decode_the_same(converted, name, device):
    """In float32: the compiler adds in another order, which BF16 would show in a token."""
    model = load_model(converted(name, "mxfp4"), dtype=torch.float32, device=device)
    wanted = generate(model, [5, 6, 7], max_new_tokens=8)
    found = generate(model, [5, 6, 7], max_new_tokens=8, torch_compile=True)
    assert found.decoding == "torch_compile"
    assert wanted.decoding == ("static_cache" if device == "cpu" else "cuda_graphs")
    assert found.ids == wanted.ids


def test_compiling_without_a_static_cache_is_refused(converted):
    model = load_model(converted("mixtral", "mxfp4"), enforce_eager=True)
    with pytest.raises(UnsupportedError, match=r"needs a static cache.*\(enforce_eager\)"):
        generate(model, [5], max_new_tokens=2, torch_compile=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_generates_the_same_from_the_same_seed(converted):
    model = load_model(converted("mixtral", "fp8_block"), device="cuda")
    options = {"max_new_tokens": 8, "temperature": 5.0, "seed": 1}
    first, again = (generate(model, [5, 6], **options) for _ in range(2))
    assert first.ids == again.ids
    assert first.tokens_per_s > 0
