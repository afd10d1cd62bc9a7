"""moequant.json proves that files are the ones that were written, and is the same everywhere."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from moequant.conversion import convert
from moequant.errors import CheckpointError, MoequantError
from moequant.preparation import prepare
from moequant.progress import SilentProgress
from moequant.storage.folder import UNFINISHED
from moequant.verification import check_integrity, verify

SETTINGS = {"format": "nvfp4", "max_shard_size": "300KB"}


@pytest.fixture(scope="module")
def source(make_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    make_checkpoint(path=path, layers=1, experts=2, vocabulary=64, shard_bytes=600_000)
    (path / "templates").mkdir()
    (path / "templates" / "chat.jinja").write_text("{{ messages }}")
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """Converted and prepared; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(source, out, **SETTINGS)
    prepare(out, target="sm100")
    return out


@pytest.fixture
def copy(converted, tmp_path):
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record_of(folder):
    return json.loads((folder / "moequant.json").read_text())


class Counting(SilentProgress):
    """How many bytes a task said it would move, and how many it did."""

    def __init__(self):
        self.total = self.done = 0

    def start(self, description, total_bytes):
        self.total += total_bytes

    def advance(self, done_bytes, current):
        self.done += done_bytes


@pytest.mark.parametrize("workers", [1, 3])
def test_what_was_written_is_read_once_and_right(converted, workers):
    progress = Counting()
    report = check_integrity(converted, workers=workers, progress=progress)
    assert report.problems == ()
    assert report.ok
    files = [p for p in converted.rglob("*") if p.is_file()]
    read = [p for p in files if p.name not in ("moequant.json", "manifest.json")]
    assert report.files == len(read)
    assert report.bytes == progress.total == progress.done == sum(p.stat().st_size for p in read)
    assert report.to_json()["record"]["plan_sha256"] == record_of(converted)["plan_sha256"]


def test_a_copy_elsewhere_is_right_too(copy):
    assert check_integrity(copy).ok


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors",
        "tokenizer.json",
        "templates/chat.jinja",
        "moequant-prepared/sm100/layer-00000.safetensors",
    ],
)
@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "gone"])
def test_damage_to_any_file_is_named(copy, file, damage):
    path = copy / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes(
            {"flipped": flipped, "shorter": content[:-1], "longer": content + b"\0"}[damage]
        )
    report = check_integrity(copy)
    (problem,) = report.problems
    assert problem.name == file
    wanted = {
        "flipped": "SHA-256 is",
        "shorter": "are recorded|SHA-256 is",
        "longer": "are recorded|SHA-256 is",
        "gone": "cannot be read",
    }[damage]
    assert any(text in problem.message for text in wanted.split("|"))
    assert not report.ok


@pytest.mark.parametrize("file", ["pickle.bin", "model-00004-of-00004.safetensors", "modeling.py"])
def test_a_file_that_was_not_written_is_named(copy, file):
    (copy / file).write_bytes(b"")
    (copy / "README.md").write_text("notes may be added")
    (copy / "LOGO.PNG").write_text("in any case")
    assert [problem.name for problem in check_integrity(copy).problems] == [file]


def test_an_unfinished_conversion_is_named(source, copy):
    from moequant.conversion.journal import Journal

    Journal(copy).begin({})
    (problem,) = check_integrity(copy).problems
    assert problem.name == ".moequant"
    assert problem.message == f"{UNFINISHED}; it will replace this checkpoint"


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda r: r.pop("shards"), "shards"),
        (lambda r: r.update(shards=[]), "shards"),
        (lambda r: r.update(shards={}), "shards"),
        (lambda r: r.update(files=None), "files"),
        (lambda r: r["files"].pop("config.json"), "files"),
        (lambda r: r.update(source=5), "source.sidecars"),
        (lambda r: r["files"].update({"../x": {"bytes": 1, "sha256": ""}}), "files"),
        (lambda r: r["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}), "files"),
        (lambda r: r["files"].update({"": {"bytes": 1, "sha256": ""}}), "files"),
        (lambda r: r["files"].update({"a\0": {"bytes": 1, "sha256": ""}}), "files"),
        (lambda r: r["shards"].update({"x": 5}), "shards"),
        (lambda r: r["shards"].update({"x": {"bytes": True, "sha256": ""}}), "shards"),
        (lambda r: r["shards"].update({"x": {"bytes": 1, "sha256": 5}}), "shards"),
        (lambda r: r["source"]["sidecars"].update({"tokenizer.json": None}), "source.sidecars"),
    ],
)
def test_a_record_that_is_none_is_named(copy, edit, place):
    record = record_of(copy)
    edit(record)
    (copy / "moequant.json").write_text(json.dumps(record))
    names = {problem.name for problem in check_integrity(copy).problems}
    assert f"moequant.json.{place}" in names


@pytest.mark.parametrize("key", ["shards", "files", "source"])
def test_what_a_record_without_a_table_does_not_name_is_not_called_added(copy, key):
    record = record_of(copy)
    del record[key]
    (copy / "moequant.json").write_text(json.dumps(record))
    (copy / "added.json").write_text("{}")
    report = check_integrity(copy)
    place = "source.sidecars" if key == "source" else key
    assert [problem.name for problem in report.problems] == [f"moequant.json.{place}"]
    assert report.files > 0, "the other tables' files are compared"


@pytest.mark.parametrize("value", [float("nan"), 5, [], {}, None])
def test_a_version_that_is_no_text_is_none(copy, value):
    (copy / "moequant.json").write_text(json.dumps(record_of(copy) | {"torch": value}))
    report = check_integrity(copy)
    assert report.record["torch"] is None
    assert json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize("text", [None, "", "[]", "{", "[" * 9999])
def test_without_a_record_there_is_nothing_to_check_by(copy, text):
    (copy / "moequant.json").unlink()
    if text is not None:
        (copy / "moequant.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"moequant\.json: "):
        check_integrity(copy)
    with pytest.raises(MoequantError, match="workers = 0"):
        check_integrity(copy, workers=0)
    with pytest.raises(CheckpointError, match="no such directory"):
        check_integrity(copy / "absent")


def test_the_record_says_what_it_must(source, converted):
    import torch

    import moequant

    record = record_of(converted)
    assert (record["moequant"], record["torch"]) == (moequant.__version__, torch.__version__)
    assert record["recipe"]["rules"] == [
        {
            "format": "nvfp4",
            "layers": None,
            "match": None,
            "options": {},
            "roles": ["routed_experts"],
            "activation_scales": None,
        }
    ]
    assert {f: e["bytes"] for f, e in record["source"]["files"].items()} == {
        path.name: path.stat().st_size for path in source.glob("*.safetensors")
    }
    for table in (record["shards"], record["files"]):
        for file, entry in table.items():
            content = (converted / file).read_bytes()
            assert entry == {"bytes": len(content), "sha256": sha256(converted / file)}
    written = {p.name for p in converted.iterdir() if p.is_file()}
    assert written == {
        "moequant.json",
        *record["shards"],
        *record["files"],
        *(file for file in record["source"]["sidecars"] if "/" not in file),
    }


def test_digests_of_the_source_are_recorded_if_asked_for(source, tmp_path):
    out = convert(source, tmp_path / "out", hash_source=True, **SETTINGS).output
    plain = convert(source, tmp_path / "plain", **SETTINGS).output
    recorded = record_of(out)
    assert recorded["source"].pop("content_sha256") == {
        path.name: sha256(path) for path in sorted(source.glob("*.safetensors"))
    }
    assert recorded == record_of(plain)
    assert verify(out, against=source, layers=0).ok
    assert check_integrity(out).ok
    # Digests are no settings: the conversion is the same with and without.
    assert convert(source, out, **SETTINGS).state == "already converted"
    assert convert(source, plain, hash_source=True, **SETTINGS).state == "already converted"


def test_a_recorded_digest_of_the_source_is_checked(source, tmp_path):
    out = convert(source, tmp_path / "out", hash_source=True, **SETTINGS).output
    record = record_of(out)
    file = next(iter(record["source"]["content_sha256"]))
    record["source"]["content_sha256"][file] = "0" * 64
    (out / "moequant.json").write_text(json.dumps(record))
    (problem,) = verify(out, against=source, layers=0).problems
    assert problem.name == f"moequant.json.source.content_sha256.{file}"


def test_a_blob_of_the_hubs_cache_that_is_not_what_it_is_called_is_damaged(source, tmp_path):
    snapshot = tmp_path / "models--o--n" / "snapshots" / ("0" * 40)
    shutil.copytree(source, snapshot)
    blobs = tmp_path / "models--o--n" / "blobs"
    blobs.mkdir()
    for path in snapshot.glob("*.safetensors"):
        blob = blobs / sha256(path)
        path.rename(blob)
        path.symlink_to(f"../../blobs/{blob.name}")
    convert(snapshot, tmp_path / "out", hash_source=True, **SETTINGS)
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"{path.name}: its SHA-256 .* damaged: remove"):
        convert(snapshot, tmp_path / "other", hash_source=True, **SETTINGS)
    assert not (tmp_path / "other" / "config.json").exists()


def test_a_second_conversion_elsewhere_reproduces_every_byte(source, tmp_path):
    """Another folder, a copy of the source with other times, other workers, an interruption."""
    first = convert(source, tmp_path / "here" / "out", workers=1, **SETTINGS).output
    copied = Path(shutil.copytree(source, tmp_path / "there" / "model", copy_function=shutil.copy))
    second = tmp_path / "there" / "elsewhere"

    class Interrupted(SilentProgress):
        left = 7

        def advance(self, done_bytes, current):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(copied, second, workers=3, progress=Interrupted(), **SETTINGS)
    convert(copied, second, workers=2, **SETTINGS)
    assert {str(p.relative_to(first)): p.read_bytes() for p in first.rglob("*") if p.is_file()} == {
        str(p.relative_to(second)): p.read_bytes() for p in second.rglob("*") if p.is_file()
    }
