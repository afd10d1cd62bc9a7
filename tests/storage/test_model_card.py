"""A card of ours says whose card it holds, and no other card passes for one."""

from __future__ import annotations

import pytest

from moequant.storage.model_card import card_is_of, mark_of, split_card

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_a_card_is_split_at_the_mark(digest):
    below = "# Theirs\n\n---\nmore\n"
    assert split_card(f"# Ours\n\n{mark_of(digest)}\n{below}") == (digest, below)


@pytest.mark.parametrize(
    "text",
    [
        "# Theirs\n",
        "",
        f"see `{mark_of(DIGEST)}`\n",
        mark_of(DIGEST).replace("0", "g"),
        mark_of(DIGEST).replace(DIGEST, DIGEST[:-1]),
    ],
)
def test_another_text_is_no_card_of_ours(tmp_path, text):
    assert split_card(text) is None
    path = tmp_path / "README.md"
    path.write_text(text)
    assert not card_is_of(path, DIGEST)


def test_a_card_is_of_one_source_and_has_one_name(tmp_path):
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text(f"# Ours\n{mark_of(DIGEST)}\n# Theirs\n")
    assert card_is_of(tmp_path / "README.md", DIGEST)
    assert not card_is_of(tmp_path / "README.md", "f" * 64)
    assert not card_is_of(tmp_path / "config.json", DIGEST)


def test_what_cannot_be_read_is_no_card(tmp_path):
    path = tmp_path / "README.md"
    assert not card_is_of(path, DIGEST)
    path.write_bytes(b"\xff\xfe" + mark_of(DIGEST).encode())
    assert not card_is_of(path, DIGEST)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert not card_is_of(path, DIGEST)
