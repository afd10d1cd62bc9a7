"""The front matter is the source's, but for what is not true of a quantized model."""

from __future__ import annotations

import hashlib
import logging
from datetime import date

import pytest
from huggingface_hub import ModelCard

from moequant.publishing.metadata import NO_CARD, merged_metadata, read_card
from moequant.storage.model_card import mark_of

SOURCE = b"""---
license: other
license_name: qwen
license_link: LICENSE
language:
- en
- no
pipeline_tag: text-generation
library_name: transformers
tags:
- moe
datasets:
- them/text
base_model: them/base
base_model_relation: finetune
new_version: them/next
model-index:
- name: it
  results: []
extra_gated_prompt: Agree.
---

# It

It speaks.
"""


def read_source(data):
    """The card of a source, as `convert` copied it."""
    return read_card(data, recorded_sha256=hashlib.sha256(data).hexdigest())


def merged(card, **changed):
    settings = {"base_model": "them/it", "quantized": True, "tags": ("moequant", "nvfp4")}
    yaml = merged_metadata(card, **{**settings, **changed})
    return ModelCard(f"---\n{yaml}\n---\n").data.to_dict()


def test_license_language_and_all_other_fields_are_carried_over():
    card = read_source(SOURCE)
    assert card.text == "\n# It\n\nIt speaks.\n"
    assert card.sha256 == hashlib.sha256(SOURCE).hexdigest()
    assert merged(card) == {
        "license": "other", "license_name": "qwen", "license_link": "LICENSE",
        "language": ["en", "no"], "pipeline_tag": "text-generation",
        "library_name": "transformers", "tags": ["moe", "moequant", "nvfp4"],
        "datasets": ["them/text"], "extra_gated_prompt": "Agree.",
        "base_model": "them/it", "base_model_relation": "quantized",
    }  # fmt: skip


def test_without_a_known_source_there_is_no_base_model():
    fields = merged(read_source(SOURCE), base_model=None)
    assert {"base_model", "base_model_relation"}.isdisjoint(fields)


def test_what_was_only_dequantized_is_not_called_quantized():
    fields = merged(NO_CARD, quantized=False)
    assert fields["base_model"] == "them/it"
    assert "base_model_relation" not in fields


def test_a_source_without_a_card_has_the_fields_that_are_known():
    assert merged(NO_CARD) == {
        "library_name": "transformers", "tags": ["moequant", "nvfp4"], "base_model": "them/it",
        "base_model_relation": "quantized",
    }  # fmt: skip


def test_one_tag_or_library_of_the_source_stays():
    card = read_source(b"---\ntags: moe\nlibrary_name: vllm\n---\n")
    fields = merged(card)
    assert fields["tags"] == ["moe", "moequant", "nvfp4"]
    assert fields["library_name"] == "vllm"


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        (b"---\nlicense: [mit\n---\n# It\n", "README.md: its front matter is no YAML"),
        (b"---\n- mit\n---\n# It\n", "README.md: its front matter is no YAML"),
        (b"# It \xff\n", "README.md: not UTF-8"),
    ],
)
def test_a_card_that_cannot_be_read_is_a_warning_and_its_text_is_kept(data, warning):
    card = read_source(data)
    assert card.metadata == {}
    assert "# It" in card.text
    assert [w[: len(warning)] for w in card.warnings] == [warning]
    assert merged(card)["base_model"] == "them/it"


@pytest.mark.parametrize("data", [b"", b"# It\n", b"---\n", b"\xef\xbb\xbf# It\n"])
def test_a_card_without_front_matter_is_right(data, caplog):
    with caplog.at_level(logging.ERROR):
        card = read_source(data)
    assert (card.metadata, card.warnings) == ({}, ())


def test_of_a_card_of_ours_the_source_s_card_is_taken():
    ours = f"---\nlicense: mit\nbase_model: them/it\n---\n# Ours\n{mark_of('1' * 64)}\n# Theirs\n"
    card = read_card(ours.encode(), recorded_sha256="1" * 64)
    assert (card.text, card.sha256, card.base_model) == ("# Theirs\n", "1" * 64, "them/it")
    assert card.metadata["license"] == "mit"
    around_none = read_card(f"# Ours\n{mark_of(None)}\n".encode(), recorded_sha256=None)
    assert (around_none.text, around_none.sha256) == ("", None)


def test_a_card_of_ours_that_was_the_source_s_is_kept_whole():
    """Of a source that `push` published: its own base model is not the new one's."""
    mark = mark_of("1" * 64)
    front = "tags: [moequant, fp8_block, fp8, moe]\nbase_model: them/it"
    ours = f"---\n{front}\n---\n# Ours\n{mark}\n# It\n"
    card = read_source(ours.encode())
    assert card.text == f"# Ours\n{mark}\n# It\n"
    assert (card.sha256, card.base_model) == (hashlib.sha256(ours.encode()).hexdigest(), None)
    fields = merged(card, base_model="me/it-fp8", tags=("moequant", "nvfp4", "compressed-tensors"))
    assert fields["tags"] == ["moe", "moequant", "nvfp4", "compressed-tensors"]
    assert fields["base_model"] == "me/it-fp8"


@pytest.mark.parametrize(
    ("front", "kept"),
    [
        (b"license: mit\nto_dict: 3\nto_yaml: 3\nget: 3\nreal: 4", {"license": "mit", "real": 4}),
        (b"release: 2024-01-01\nlicense: mit", {"license": "mit", "release": date(2024, 1, 1)}),
        (b"license: mit\r\nbase_model:\r\n- a/b\r\n- c/d\r\n", {"license": "mit"}),
        (b"license:\nlibrary_name:\nlanguage:", {}),
        (b"tags: {a: b}\nlicense: [mit, x]", {"license": ["mit", "x"]}),
    ],
)
def test_strange_fields_are_kept_and_break_nothing(front, kept):
    fields = merged(read_source(b"---\n" + front + b"\n---\n# It\n"), tags=("moequant",))
    assert fields.pop("tags")[-1] == "moequant"
    base = {"base_model": "them/it", "base_model_relation": "quantized"}
    assert fields == {"library_name": "transformers", **base, **kept}


@pytest.mark.parametrize("key", [b"self: 1", b"1: 2"])
def test_front_matter_that_the_hub_s_library_cannot_hold_is_a_warning(key):
    card = read_source(b"---\nlicense: mit\n" + key + b"\n---\n# It\n")
    assert card.metadata == {}
    assert "its front matter is no YAML that can be read" in card.warnings[0]
