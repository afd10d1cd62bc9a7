"""Tests with another tokenizer are refused, with the difference."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moequant.errors import UnsupportedError
from moequant.evaluation import evaluate

WORDS = ["<unk>", "<|endoftext|>", *(f"w{n}" for n in range(60))]
SETTINGS = {"windows": 4, "window_tokens": 16}


@pytest.fixture
def with_words(make_checkpoint, tmp_path):
    """with_words(name, words, **changes): a copy of a checkpoint with this vocabulary."""

    def make(name, words=WORDS, normalizer=None):
        folder = tmp_path / name
        shutil.copytree(make_checkpoint(), folder)
        vocabulary = {word: n for n, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0]).save_pretrained(
            folder
        )
        return folder

    return make


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\f".join(" ".join(f"w{(7 * n + s) % 60}" for n in range(40)) for s in (0, 3)))
    return path


def test_the_same_tokenizer_is_compared_and_sections_are_kept_apart(with_words, text):
    source = with_words("source")
    result = evaluate(source, [with_words("copy")], text, **SETTINGS)
    assert [s.windows for s in result.tests[0].figures.sections] == [2, 2]
    assert result.plan.data["first_tokens"] == [1]
    assert result.tests[0].figures.kl_max == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*WORDS[:10], WORDS[11], WORDS[10], *WORDS[12:]],
            "2 tokens differ, such as 'w8', which is id 11 here and id 10 in the reference",
        ),
        (WORDS[:-1], "1 tokens differ, such as 'w59', which is no token here and id 61 in the"),
        ([*WORDS, "new"], "1 tokens differ, such as 'new', which is id 62 here and no token in"),
    ],
)
def test_another_vocabulary_is_refused(with_words, text, words, message):
    with pytest.raises(UnsupportedError, match=f"other: not the tokenizer of .*: {message}"):
        evaluate(with_words("source"), [with_words("other", words)], text, **SETTINGS)


def test_other_ids_of_the_same_vocabulary_are_refused(with_words, text):
    other = with_words("other", normalizer=normalizers.Replace("w3 ", "w4 "))
    with pytest.raises(UnsupportedError, match="token 10 of window 0 is id 6 here and id 5 in the"):
        evaluate(with_words("source"), [other], text, **SETTINGS)


def test_token_ids_need_no_tokenizer(make_checkpoint, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": list(range(3, 90))}))
    source = make_checkpoint()
    (found,) = evaluate(source, [source], path, **SETTINGS).tests
    assert found.figures.kl_max == 0.0
