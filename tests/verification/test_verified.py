"""What was verified is noted by digests that any later change of a file contradicts."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moequant.conversion import convert
from moequant.errors import CheckpointError, MoequantError
from moequant.preparation import prepare
from moequant.storage.files import VERIFIED_FILE
from moequant.storage.model_card import mark_of
from moequant.verification import check_integrity, note_verified, verify
from moequant.verification.verified import digests_of, read_verified

CARD = "---\nlicense: mit\n---\n# The source\n"


@pytest.fixture(scope="module")
def source(make_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    make_checkpoint(path=path, layers=1, experts=2, vocabulary=64)
    (path / "README.md").write_text(CARD)
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """Converted and prepared; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(source, out, format="nvfp4")
    prepare(out, target="sm100")
    return out


@pytest.fixture(scope="module")
def report(source, converted):
    return verify(converted, against=source)


@pytest.fixture
def copy(converted, tmp_path):
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def test_a_report_has_the_digests_of_what_was_verified(converted, report):
    assert report.ok
    record = hashlib.sha256((converted / "moequant.json").read_bytes()).hexdigest()
    manifest = converted / "moequant-prepared" / "sm100" / "manifest.json"
    assert report.record_sha256 == record
    assert report.manifests_sha256 == {"sm100": hashlib.sha256(manifest.read_bytes()).hexdigest()}


def test_a_note_is_read_as_it_was_written_and_is_no_part_of_the_checkpoint(source, copy, report):
    assert read_verified(copy) is None
    note_verified(replace(report, converted=str(copy)))
    note = read_verified(copy)
    assert note is not None
    assert note.report.record_sha256 == report.record_sha256
    assert note.report.manifests_sha256 == report.manifests_sha256
    assert [f.format for f in note.report.formats] == ["nvfp4"]
    assert note.report.formats[0].relative_error == report.formats[0].total.relative_error
    assert {group.projection for group in note.report.errors} == {"gate", "up", "down"}
    assert check_integrity(copy).ok
    assert verify(copy, against=source, layers=0).ok


def test_what_changes_while_it_is_verified_has_other_digests(source, copy, monkeypatch):
    """moequant.json is replaced between the first look and the first check."""
    from moequant.verification import pipeline

    def read_stored(path, findings):
        file = path / "moequant.json"
        file.write_text(file.read_text() + "\n")
        return found(path, findings)

    found = pipeline.read_stored
    monkeypatch.setattr(pipeline, "read_stored", read_stored)
    verified = verify(copy, against=source, layers=0)
    assert verified.ok
    assert verified.record_sha256 != digests_of(copy)[0]


def test_a_report_with_problems_is_not_noted(source, copy):
    (copy / "tokenizer.json").write_text("{}")
    found = verify(copy, against=source, layers=0)
    with pytest.raises(MoequantError, match="has 1 problems, so it cannot be noted as verified"):
        note_verified(found)
    assert read_verified(copy) is None


def test_a_checkpoint_of_another_tool_is_not_noted(source, copy):
    (copy / "moequant.json").unlink()
    shutil.rmtree(copy / "moequant-prepared")
    found = verify(copy, against=source, layers=0)
    assert found.ok
    with pytest.raises(MoequantError, match=r"has no moequant\.json"):
        note_verified(found)


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"report": {"ok": False}}, r"report\.ok"),
        ({"moequant": None}, "moequant"),
    ],
)
def test_an_edited_note_is_an_error_that_names_the_place(copy, report, edited, message):
    note_verified(replace(report, converted=str(copy)))
    path = copy / VERIFIED_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **edited}))
    with pytest.raises(CheckpointError, match=rf"{message}: .*remove the file and run"):
        read_verified(copy)


def card_around(path):
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"---\nlicense: mit\n---\n# Ours\n{mark_of(digest)}\n# The source\n"


def test_a_card_of_ours_around_the_sources_card_is_right(source, copy):
    card = card_around(copy / "README.md")
    (copy / "README.md").write_text(card)
    assert check_integrity(copy).ok
    assert verify(copy, against=source, layers=0).ok


def test_a_card_of_ours_around_another_card_is_a_problem(source, copy, tmp_path):
    (tmp_path / "README.md").write_text("# Another\n")
    (copy / "README.md").write_text(card_around(tmp_path / "README.md"))
    assert [p.name for p in check_integrity(copy).problems] == ["README.md"]
    assert [p.name for p in verify(copy, against=source, layers=0).problems] == ["README.md"]


def test_prepared_folders_may_be_left_out_of_the_check_of_files(copy):
    (layer,) = (copy / "moequant-prepared" / "sm100").glob("*.safetensors")
    layer.write_bytes(b"")
    assert not check_integrity(copy).ok
    assert check_integrity(copy, prepared=False).ok
