"""The journal believes what it can check, and clears away the rest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from moequant.conversion.finished_shard import FinishedShard, UsedQuantizer
from moequant.conversion.journal import Journal
from moequant.errors import MoequantError
from moequant.progress import SilentProgress

FILES = ["a.safetensors", "b.safetensors"]


def write(journal, file, content, quantizer=None):
    journal.partial(file).write_bytes(content)
    shard = FinishedShard(
        file=file,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        quantizer=quantizer,
    )
    journal.record(shard)
    return shard


@pytest.fixture
def journal(tmp_path):
    """Of two shards, both finished."""
    journal = Journal(tmp_path / "out")
    journal.begin({"plan_sha256": "x"})
    for file in FILES:
        write(journal, file, file.encode() * 100)
    return journal


def lines_of(journal):
    return (journal.folder / "journal.jsonl").read_bytes()


def test_finished_shards_are_found_where_they_are(journal):
    assert list(journal.resume(FILES, SilentProgress())) == FILES
    (journal.shards / FILES[0]).rename(journal.output / FILES[0])
    assert list(journal.resume(FILES, SilentProgress())) == FILES


def test_a_begun_shard_gives_its_space_back(journal):
    journal.partial("c.safetensors").write_bytes(bytes(1000))
    (journal.shards / "stray.safetensors").write_bytes(bytes(1000))
    assert list(journal.resume([*FILES, "c.safetensors"], SilentProgress())) == FILES
    assert sorted(path.name for path in journal.shards.iterdir()) == FILES


def test_a_shard_of_another_plan_is_not_finished(journal):
    assert list(journal.resume(FILES[:1], SilentProgress())) == FILES[:1]
    assert sorted(path.name for path in journal.shards.iterdir()) == FILES[:1]


@pytest.mark.parametrize("tail", [b'{"file": "c', b"\0\xff\xfe", b"\n\n", b"[" * 100_000])
def test_a_torn_line_does_not_spoil_the_next(journal, tail):
    whole = lines_of(journal)
    (journal.folder / "journal.jsonl").write_bytes(whole + tail)
    assert list(journal.resume(FILES, SilentProgress())) == FILES
    assert lines_of(journal) == whole
    write(journal, "c.safetensors", b"c")
    assert list(journal.resume([*FILES, "c.safetensors"], SilentProgress())) == [
        *FILES,
        "c.safetensors",
    ]


def test_what_quantized_a_shard_is_kept(journal):
    used = UsedQuantizer(name="torch", reason="no LLVM", host="b")
    shard = write(journal, "c.safetensors", b"c", quantizer=used)
    assert journal.resume([*FILES, shard.file], SilentProgress())[shard.file] == shard


@pytest.mark.parametrize("quantizer", [5, {}, {"name": 5, "reason": None, "host": None}, "torch"])
def test_a_line_that_says_it_wrongly_is_no_line(journal, quantizer):
    lines = [json.loads(line) for line in lines_of(journal).splitlines()]
    lines[0]["quantizer"] = quantizer
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (journal.folder / "journal.jsonl").write_text(text)
    assert list(journal.resume(FILES, SilentProgress())) == FILES[1:]


def test_a_right_journal_is_not_written_again(journal):
    before = (journal.folder / "journal.jsonl").stat().st_ino
    journal.resume(FILES, SilentProgress())
    assert (journal.folder / "journal.jsonl").stat().st_ino == before


def test_a_new_plan_stands_beside_nothing_of_the_old(journal):
    journal.begin({"plan_sha256": "y"})
    assert json.loads((journal.folder / "plan.json").read_text()) == {"plan_sha256": "y"}
    assert journal.resume(FILES, SilentProgress()) == {}
    assert list(journal.shards.iterdir()) == []


def test_a_work_folder_without_its_journal_or_shards_is_resumed_from_nothing(journal):
    (journal.folder / "journal.jsonl").unlink()
    for path in journal.shards.iterdir():
        path.unlink()
    journal.shards.rmdir()
    assert journal.resume(FILES, SilentProgress()) == {}
    write(journal, FILES[0], b"a")
    assert list(journal.resume(FILES, SilentProgress())) == FILES[:1]


def test_closed_there_is_nothing(journal):
    journal.close()
    assert not journal.exists
    assert list(journal.output.iterdir()) == []


def test_closed_while_a_file_disappears_there_is_nothing_either(journal, monkeypatch):
    """As the shard of a source that a thread deletes."""
    unlink, lost = os.unlink, []

    def twice(path, **where):
        unlink(path, **where)
        if not lost and Path(path).name == FILES[0]:
            lost.append(path)
            unlink(path, **where)

    monkeypatch.setattr(os, "unlink", twice)
    journal.close()
    assert lost
    assert list(journal.output.iterdir()) == []


@pytest.mark.parametrize("work", ["asks for the lock", "is done"])
def test_closed_while_another_run_comes_it_is_that_ones_to_clear_up(journal, monkeypatch, work):
    rmdir = os.rmdir

    def late(path, **where):
        if Path(path) == journal.folder:
            monkeypatch.setattr(os, "rmdir", rmdir)
            (journal.folder / "lock").touch()
            if work == "is done":
                journal.close()
        rmdir(path, **where)

    monkeypatch.setattr(os, "rmdir", late)
    journal.close()
    assert not journal.exists


def test_the_last_of_two_lines_for_a_shard_holds(journal):
    entry = {"file": FILES[0], "bytes": 1, "sha256": "0" * 64}
    with (journal.folder / "journal.jsonl").open("a") as lines:
        lines.write(json.dumps(entry) + "\n")
    assert list(journal.resume(FILES, SilentProgress())) == FILES[1:]
    write(journal, FILES[0], b"again")
    assert sorted(journal.resume(FILES, SilentProgress())) == FILES


def test_a_line_that_could_not_be_written_does_not_spoil_the_next(journal, monkeypatch):
    whole, real = lines_of(journal), os.write

    def half_then_full(fd, data):
        if len(data) > 20:
            return real(fd, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", half_then_full)
        with pytest.raises(MoequantError, match="No space left on device"):
            write(journal, "c.safetensors", b"c")
    assert lines_of(journal) == whole
    write(journal, "d.safetensors", b"d")
    files = [*FILES, "c.safetensors", "d.safetensors"]
    assert list(journal.resume(files, SilentProgress())) == [*FILES, "d.safetensors"]
