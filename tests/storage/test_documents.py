from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from moequant.errors import CheckpointError
from moequant.storage import documents
from moequant.storage.documents import non_finite_numbers, parse_object, read_document
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from pathlib import Path


def nested(depth: int) -> str:
    """An object whose innermost list is `depth` levels down."""
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def read(path: Path, text: str) -> dict[str, object]:
    path.write_text(text)
    return read_document(FixedFile.at(path))


def test_document_is_read(tmp_path: Path) -> None:
    value = {"a": [1, None, {"b": 2.5}], "c": "ü"}
    assert read(tmp_path / "x", json.dumps(value)) == value


def test_depth_is_bounded(tmp_path: Path) -> None:
    assert read(tmp_path / "x", nested(99))
    with pytest.raises(CheckpointError, match="nested deeper than the 100 levels"):
        read(tmp_path / "x", nested(101))
    with pytest.raises(CheckpointError, match="nested deeper than the 100 levels"):
        read(tmp_path / "x", '{"a": ' * 200 + "1" + "}" * 200)


def test_what_is_let_through_can_be_written_again(tmp_path: Path) -> None:
    value = read(tmp_path / "x", nested(99))
    assert json.loads(json.dumps(value, indent=2)) == value


def test_size_is_bounded_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    assert read(tmp_path / "x", '{"abc": 1}')
    with pytest.raises(CheckpointError, match="11 bytes, but at most 10 are allowed"):
        read(tmp_path / "x", '{"abc": 12}')


def test_brackets_are_bounded_in_large_files_alone(tmp_path: Path) -> None:
    assert parse_object(b'{"a":[' + b"[]," * 1000 + b"0]}", tmp_path)
    with pytest.raises(CheckpointError, match="400002 brackets in 1200009 bytes"):
        parse_object(b'{"a":[' + b"[]," * 400_000 + b"0]}", tmp_path)


def test_numbers_that_json_lacks_are_found_with_their_places(tmp_path: Path) -> None:
    text = '{"eps": NaN, "rope": {"limit": [0.0, Infinity, -1e999]}, "text": "NaN", "one": 1e3}'
    found = list(non_finite_numbers(read(tmp_path / "x", text)))
    assert str(found) == "[('eps', nan), ('rope.limit[1]', inf), ('rope.limit[2]', -inf)]"


def test_numbers_that_json_lacks_are_found_however_deep_they_are(tmp_path: Path) -> None:
    text = '{"a": ' + "[" * 98 + "NaN" + "]" * 98 + "}"
    ((place, _),) = non_finite_numbers(read(tmp_path / "x", text))
    assert place == "a" + "[0]" * 98
