"""What a commit removes is the old output's, and nothing else."""

from __future__ import annotations

import json

import pytest

from moequant.conversion import convert

SETTINGS = {"max_shard_size": "300KB"}


@pytest.fixture
def old(small_source, tmp_path):
    """An output in another format than the one that will replace it."""
    return convert(small_source, tmp_path / "out", format="mxfp4", **SETTINGS).output


@pytest.fixture(scope="module")
def fresh(small_source, tmp_path_factory):
    out = tmp_path_factory.mktemp("fresh") / "out"
    return convert(small_source, out, format="nvfp4", **SETTINGS).output


@pytest.fixture
def replace(small_source, old):
    def replace():
        return convert(small_source, old, format="nvfp4", overwrite=True, **SETTINGS)

    return replace


def claim(old, *names):
    """Have the record say that files came along."""
    record = json.loads((old / "moequant.json").read_text())
    record["source"]["sidecars"] |= dict.fromkeys(names, "0" * 64)
    (old / "moequant.json").write_text(json.dumps(record))


def test_nothing_outside_the_output_goes_by_an_edited_record(
    old, replace, tmp_path, contents, fresh
):
    (tmp_path / "diary.txt").write_text("mine")
    (old / "folder").mkdir()
    (old / "folder" / "notes.md").write_text("mine too")
    (old / "link.md").symlink_to(tmp_path)
    names = ["../diary.txt", str(tmp_path / "diary.txt"), "folder", "", ".", "..", "a\0b"]
    claim(old, *names, "link.md/diary.txt", "x" * 5000, "absent")
    replace()
    assert (tmp_path / "diary.txt").read_text() == "mine"
    (old / "link.md").unlink()
    assert contents(old) == contents(fresh) | {"folder/notes.md": b"mine too"}


def test_links_in_the_output_go_and_what_they_lead_to_stays(
    old, replace, tmp_path, contents, fresh
):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sm100").mkdir(parents=True)
    for name in ("config.json", "model-00001-of-00003.safetensors"):
        (old / name).rename(elsewhere / name)
        (old / name).symlink_to(elsewhere / name)
    (old / "moequant-prepared").symlink_to(elsewhere)
    before = contents(elsewhere)
    replace()
    assert contents(elsewhere) == before
    assert (elsewhere / "sm100").is_dir()
    assert not any(path.is_symlink() for path in old.rglob("*"))
    assert contents(old) == contents(fresh)


def test_the_old_record_goes_last(old, replace, monkeypatch):
    """Should the commit be given up in its middle, the next one learns what to remove."""
    from pathlib import Path

    unlink, removed = Path.unlink, []

    def noted(path, **options):
        if path.parent == old:
            removed.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noted)
    replace()
    assert removed[0] == "config.json"
    assert removed[-1] == "moequant.json"


def test_files_of_a_commit_that_was_given_up_are_removed_by_the_next(
    struck, small_source, tmp_path, contents, make_checkpoint, fresh
):
    """Another source takes the place of one whose files had begun to move."""
    other = tmp_path / "other"
    make_checkpoint(path=other, layers=1, experts=2, vocabulary=64, shard_bytes=600_000, seed=1)
    (other / "chat_template.jinja").write_text("of the other")
    out = tmp_path / "out"
    settings = {"format": "nvfp4", "workers": 1, **SETTINGS}
    calls = struck(other, tmp_path / "count", **settings)["calls"]
    # Before the last rename, that of config.json.
    last = max(i for i, call in enumerate(calls, start=1) if call == "replace")
    assert struck(other, out, {"at": last, "kill": True}, **settings) == {"killed": True}
    assert (out / "chat_template.jinja").exists()
    assert not (out / "config.json").exists()
    convert(small_source, out, overwrite=True, **settings)
    assert contents(out) == contents(fresh)
