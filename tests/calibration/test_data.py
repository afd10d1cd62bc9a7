"""Text and datasets become windows of token ids, without padding, and faults are named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moequant.calibration.data import read_data
from moequant.errors import DataError, MoequantError, UnsupportedError
from moequant.streaming import samples

WORDS = ["<s>", "<unk>", *"abcdefgh", "user", "assistant", ":"]
IDS = {word: number for number, word in enumerate(WORDS)}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"


def make_tokenizer(folder, *, single="<s> $A", template=TEMPLATE):
    begin, unknown = WORDS[:2]
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", IDS["<s>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, unk_token=unknown, chat_template=template
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return make_tokenizer(tmp_path / "model")


@pytest.fixture
def read(tmp_path, folder):
    """read(content, name): the data of a file with this content."""

    def read(content, name="data.jsonl", **settings):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        given = {"tokens": 1000, "window_tokens": 4, "batch_tokens": 8} | settings
        return read_data(path, **{"folder": folder, "vocabulary": len(WORDS)} | given)

    return read


def windows(data):
    return [window for batch in data.batches for window in batch.tolist()]


def ids(text):
    return [IDS[word] for word in text.split()]


def test_each_window_of_text_begins_as_the_tokenizer_begins_a_text(read):
    data = read("a b c d e\f\n\ff g h a b c d", name="text.txt")
    assert windows(data) == [
        ids("<s> a b c"), ids("<s> f g h"), ids("<s> a b c"), ids("<s> d e"), ids("<s> d"),
    ]  # fmt: skip
    assert [batch.shape for batch in data.batches] == [(2, 4), (1, 4), (1, 3), (1, 2)]
    record = data.record
    assert (record.samples, record.windows, record.tokens) == (2, 5, 17)
    assert not record.chat_template


def test_a_tokenizer_that_begins_texts_with_nothing(tmp_path, read):
    folder = make_tokenizer(tmp_path / "other", single="$A")
    assert windows(read("a b c d e f", name="t", folder=folder)) == [ids("a b c d"), ids("e f")]


def test_what_the_tokenizer_puts_behind_a_text_begins_no_window(tmp_path, read):
    folder = make_tokenizer(tmp_path / "other", single="<s> <s> $A <s>")
    found = windows(read("a b c", name="t", folder=folder))
    assert found == [ids("<s> <s> a b"), ids("<s> <s> c")]


def test_a_long_text_is_tokenized_in_pieces_that_end_with_a_line(read, monkeypatch):
    monkeypatch.setattr(samples, "PIECE_CHARACTERS", 16)
    seen, tokenize = [], samples.Samples._tokenize
    monkeypatch.setattr(
        samples.Samples,
        "_tokenize",
        lambda self, piece, where: seen.append(piece) or tokenize(self, piece, where),
    )
    first, second = "a b c\nd e f\ng h a b c d e f g h a b\nc d", "\u2028 \u00e9 a\n" * 9
    data = read(f"\ufeff{first}\f{second}", name="text.txt", window_tokens=1000)
    assert "".join(seen) == first + second
    assert max(map(len, seen)) <= 16
    assert seen[:4] == ["a b c\nd e f\n", "g h a b c d e f ", "g h a b\nc d", second[:12]]
    assert windows(data) == [[0, *ids(first)], [0, *[1, 2] * 9]]
    dataset = json.dumps({"text": first}) + "\r\n" + json.dumps({"text": second})
    assert windows(read(b"\xef\xbb\xbf" + dataset.encode(), window_tokens=1000)) == windows(data)
    whole = f"\ufeff{first}\f{second}".encode()
    assert data.record.file_sha256 == hashlib.sha256(whole).hexdigest()


def test_token_ids_are_taken_as_they_are_and_need_no_tokenizer(tmp_path, read):
    lines = "".join(json.dumps({"input_ids": i}) + "\n" for i in ([5, 4, 3, 2, 1], [7, 8], [9]))
    data = read(lines + "\n", folder=tmp_path)
    assert windows(data) == [[5, 4, 3, 2], [7, 8]]
    assert (data.record.samples, data.record.file_sha256) == (
        3, hashlib.sha256(lines.encode() + b"\n").hexdigest(),
    )  # fmt: skip
    content = struct.pack("<8q", 4, 5, 4, 3, 2, 2, 7, 8)
    assert data.record.sha256 == hashlib.sha256(content).hexdigest()


def test_the_chat_template_is_applied_to_messages_and_that_is_recorded(read):
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    data = read(json.dumps({"messages": messages}), window_tokens=20)
    assert windows(data) == [ids("user : a b assistant : c")]
    assert data.record.chat_template
    assert windows(read('{"text": "a b"}')) == [ids("<s> a b")]


def test_texts_may_hold_line_ends_of_other_systems(read):
    line = json.dumps({"text": "a\u2028b"}, ensure_ascii=False)
    assert windows(read(line)) == [ids("<s> a b")]


def test_a_window_is_no_longer_than_the_limit(read):
    data = read('{"input_ids": [1, 2, 3, 4, 5, 6]}', tokens=3)
    assert (windows(data), data.record.window_tokens) == ([[4, 5, 6]], 3)


@pytest.mark.parametrize("tokens", [4, 12, 40, 41, 79, 80, 1000])
def test_windows_are_taken_evenly_up_to_the_limit(read, tokens):
    lines = "".join(json.dumps({"input_ids": [n, 1, 1, 1]}) + "\n" for n in range(13))
    data = read(lines, tokens=tokens)
    first = sorted(window[0] for window in windows(data))
    assert len(first) == min(tokens // 4, 13)
    gaps = [later - earlier for earlier, later in pairwise(first)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_batch_has_windows_of_one_length_and_at_least_one(read):
    lines = "".join(json.dumps({"input_ids": [1] * n}) + "\n" for n in (3, 4, 2, 4, 4, 3))
    for limit, shapes in (
        (8, [(2, 4), (1, 4), (2, 3), (1, 2)]),
        (1, [(1, 4)] * 3 + [(1, 3)] * 2 + [(1, 2)]),
        (100, [(3, 4), (2, 3), (1, 2)]),
    ):
        assert [tuple(b.shape) for b in read(lines, batch_tokens=limit).batches] == shapes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON"),
        ("[1]", r"line 2: \[1\], but must be an object with exactly one of text"),
        ('{"texts": "a"}', r"line 2: .* exactly one of text, messages, input_ids"),
        ('{"text": "a", "input_ids": [1]}', r"line 2: .* exactly one of"),
        ('{"text": "a\\ud800"}', r"line 2: character 1 is '\\ud800', half of a surrogate pair"),
        ('{"text": 5}', r"line 2: text is 5, but must be a string"),
        ('{"input_ids": 5}', r"line 2: input_ids is 5, but must be a list"),
        ('{"input_ids": [1, "2"]}', r"line 2: '2' is no token id of the model; ids are 0 to 12"),
        ('{"input_ids": [1, 13]}', r"line 2: 13 is no token id"),
        ('{"input_ids": [true]}', r"line 2: True is no token id"),
        ('{"input_ids": [-1]}', r"line 2: -1 is no token id"),
        ('{"messages": [5]}', r"line 2: the tokenizer's chat template cannot be applied"),
    ],
)
def test_a_bad_line_is_named(read, line, message):
    with pytest.raises(DataError, match=message):
        read('{"text": "a b"}\n' + line + "\n")


def test_a_tokenizer_without_template_takes_no_messages(tmp_path, read):
    folder = make_tokenizer(tmp_path / "plain", template=None)
    with pytest.raises(DataError, match="chat template cannot be applied"):
        read('{"messages": [{"role": "user", "content": "a"}]}', folder=folder)


def test_a_tokenizer_of_another_model_is_found_out(read):
    with pytest.raises(DataError, match="is no token id of the model; ids are 0 to 3"):
        read("a b c", name="text.txt", vocabulary=4)


def test_text_without_a_tokenizer_is_refused(tmp_path, read):
    with pytest.raises(UnsupportedError, match=r"no tokenizer; .*, as lines .* of a \.jsonl file"):
        read("a b", name="text.txt", folder=tmp_path)


@pytest.mark.parametrize("name", ["text.txt", "data.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused_as_such(read, content, name):
    with pytest.raises(DataError, match=f"{name}: no text in it; give a file with text or token"):
        read(content, name=name)


@pytest.mark.parametrize("content", [b"a", b"\f a \n\f"])
def test_a_file_without_a_window_is_refused(tmp_path, read, content):
    folder = make_tokenizer(tmp_path / "other", single="$A")
    with pytest.raises(DataError, match="no window of 2 to 4 tokens in it"):
        read(content, name="text.txt", folder=folder)


@pytest.mark.parametrize("name", ["text.txt", "data.jsonl"])
@pytest.mark.parametrize(
    ("content", "byte"),
    [
        (b"ab\xff", 2),
        (b'{"text": "a"}\n' * 3 + b"\xc3", 42),
        (b'{"text": "\xc3\xa9"}\xe2\x82', 14),
    ],
)
def test_bytes_that_are_no_text_are_refused(read, monkeypatch, name, content, byte):
    monkeypatch.setattr(samples, "PIECE_CHARACTERS", 2)
    with pytest.raises(DataError, match=f"byte {byte} is not UTF-8"):
        read(content, name=name)


def test_a_file_that_may_not_be_read_has_the_usual_advice(read, monkeypatch):
    before = Path.open

    def refused(path, mode="r", *arguments, **others):
        if (path.name, mode) == ("data.jsonl", "rb"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return before(path, mode, *arguments, **others)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(
        MoequantError, match=r"cannot be read: Permission denied; get the right"
    ) as raised:
        read(b"a")
    assert not isinstance(raised.value, DataError)


def test_a_file_that_is_not_there_is_named(tmp_path, folder):
    with pytest.raises(DataError, match=r"none: cannot be read: No such file .*; give a file of"):
        read_data(
            tmp_path / "none",
            folder=folder,
            vocabulary=9,
            tokens=9,
            window_tokens=9,
            batch_tokens=9,
        )
