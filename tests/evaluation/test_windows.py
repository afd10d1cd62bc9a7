"""Windows have one length, come evenly from all sections, and begin with one token."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moequant.errors import DataError
from moequant.evaluation.windows import read_windows

BEGIN, END = "<s>", "</s>"
WORDS = ["<unk>", "<s>", "</s>", "<|endoftext|>", *"abcdefgh"]


def make_tokenizer(folder, *, words=WORDS, prefix=False, **special):
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", words.index("<s>"))]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=WORDS[0], **special
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def read(tmp_path):
    def read(content, name="text.txt", *, folder=None, windows=4, tokens=4):
        path = tmp_path / name
        path.write_text(content)
        folder = folder or make_tokenizer(tmp_path / "model", bos_token=BEGIN, eos_token=END)
        return read_windows(
            path, folder=folder, vocabulary=len(WORDS), windows=windows, tokens=tokens
        )

    return read


def words(row):
    return "".join(WORDS[id_] for id_ in row.tolist())


def test_windows_come_evenly_from_all_sections(read):
    # Runs of three: seven of the first section, two of the second; four windows of one and three
    # of the other would be wanted of seven, so five are asked for.
    found = read("a b c " * 5 + "d e f g h a" + "\f\n\f" + "h h h g g g f", windows=5)
    assert [words(row) for row in found.ids] == [
        f"<|endoftext|>{run}" for run in ("abc", "abc", "abc", "hhh", "ggg")
    ]
    assert found.sections == (0, 0, 0, 1, 1)
    assert found.record["windows_by_section"] == [3, 2]
    assert [len(batch) for batch in found.batches(8)] == [2, 2, 1]
    assert len(found.batches(1)) == 5


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"prefix": True}, "<s>"),
        ({}, "<|endoftext|>"),
        ({"words": [w.replace("|", "") for w in WORDS], "eos_token": "</s>"}, "</s>"),
        (
            {"words": [w.replace("|", "") for w in WORDS], "eos_token": "</s>", "bos_token": "<s>"},
            "<s>",
        ),
    ],
)
def test_a_window_begins_with_what_begins_a_text(read, tmp_path, settings, first):
    folder = make_tokenizer(tmp_path / "other", **settings)
    found = read("a b c d e f", folder=folder, windows=2)
    assert [words(row[:1]) for row in found.ids] == [first] * 2
    assert found.first == (WORDS.index(first),)


def test_a_dataset_is_one_section_and_its_ids_have_no_first_token(read, tmp_path):
    lines = [{"input_ids": [n] * 9} for n in range(4, 7)]
    found = read("".join(json.dumps(line) + "\n" for line in lines), "ids.jsonl", folder=tmp_path)
    assert found.ids.tolist() == [[4] * 4, [4] * 4, [5] * 4, [6] * 4]
    assert (found.section_count, found.first, found.tokenizer) == (1, (), None)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("a b c\fd", {"windows": 2}, "section 1 has 0 windows of 4 tokens, but 1 are wanted"),
        ("\f", {}, "no text in it"),
        ("a b c", {"folder": "no token"}, "puts no token before a text and has none of"),
    ],
)
def test_data_that_cannot_be_used_is_refused(read, tmp_path, content, settings, message):
    if "folder" in settings:
        bare = [w.replace("|", "") for w in WORDS]
        settings = {"folder": make_tokenizer(tmp_path / "bare", words=bare)}
    with pytest.raises(DataError, match=message):
        read(content, **settings)
