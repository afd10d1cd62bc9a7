from __future__ import annotations

from pathlib import Path

import pytest

from moequant.errors import CheckpointError, UnsupportedError
from moequant.runtime import load_experts
from moequant.storage.folder import given_folder


class BytesPath:
    def __fspath__(self):
        return b"model"


@pytest.mark.parametrize("given", [None, 5, [], b"model", BytesPath()])
def test_what_is_no_path_is_refused_by_name(given):
    said = r"^checkpoint is .*, but must be the path of a checkpoint's folder, as a str or Path$"
    with pytest.raises(UnsupportedError, match=said):
        load_experts(given, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a\0b", r"^model is 'a\\x00b', but must be .*: embedded null byte; remove"),
        (Path("a\0b"), r"^model is 'a\\x00b', but must be .*: embedded null byte; remove"),
        ("\ud800", r"^model is '\\ud800', but must be .*surrogates not allowed; remove"),
        ("x" * 5000, r"^model is 'xxx.*xxx', but must be .*: File name too long; give a shorter"),
        ("/x" * 3000, r"^model is '/x/x.*/x', but must be .*: File name too long; give a shorter"),
    ],
)
def test_a_path_that_no_folder_can_have_is_refused_by_name(given, said):
    with pytest.raises(CheckpointError, match=said):
        given_folder("model", given)


def test_a_folder_that_does_not_exist_is_a_path_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert given_folder("model", "~/none") == tmp_path / "none"
    assert given_folder("model", tmp_path / "none") == tmp_path / "none"
