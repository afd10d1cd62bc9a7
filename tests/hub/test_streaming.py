"""A repository on the hub is converted while it is fetched, in bounded space, to the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from signal import SIGINT

import pytest

from moequant.storage.hub import HubFile, HubRepository

SETTINGS = ("--format", "nvfp4", "--max-shard-size", "2MB", "--workers", "2", "--hash-source")
DELETE = "--delete-source-shards"


@pytest.fixture(scope="module")
def many_shards(make_checkpoint):
    """19 MB in shards of at most 2 MB; output shards are of as much, from two or three of them."""
    return make_checkpoint(layers=2, experts=6, hidden=512, intermediate=512, shard_bytes=2_000_000)


@pytest.fixture
def hub(hub, many_shards):
    shutil.copytree(many_shards, hub.folder, dirs_exist_ok=True)
    return hub


@pytest.fixture(scope="module")
def wanted(servers, many_shards, tmp_path_factory):
    """What is made of the directory."""
    commands, out = servers[1], tmp_path_factory.mktemp("wanted") / "out"
    arguments = ["convert", str(many_shards), str(out), *SETTINGS]
    commands.ask({"arguments": arguments})
    code, _, err = commands.ask({})
    assert code == 0, err
    return contents(out)


def contents(folder):
    """Bytes of every file; of the record without where the source came from."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    record = json.loads(found["moequant.json"])
    for key in ("repository", "revision", "commit"):
        record["source"].pop(key, None)
    return {**found, "moequant.json": record}


def shards(hub):
    return {path.name: path.stat().st_size for path in sorted(hub.folder.glob("*.safetensors"))}


def sent(hub):
    """The weight files that were sent, in order, without the requests for headers."""
    return [e["file"] for e in hub.asked() if e["file"] in shards(hub) and e["bytes"] > 1 << 17]


def convert(hub, out, *more, **fault):
    return hub.run("convert", hub.id, out, *SETTINGS, *more, **fault)


@pytest.mark.parametrize("more", [(), (DELETE,)], ids=["kept", "deleted"])
def test_streamed_bytes_and_record_are_those_of_a_directory(hub, wanted, tmp_path, more):
    out = tmp_path / "out"
    done = convert(hub, out, *more)
    assert done.code == 0, done.err
    assert contents(out) == wanted
    source = json.loads((out / "moequant.json").read_text())["source"]
    assert (source["repository"], source["commit"]) == (hub.id, "0123456789" * 4)
    fetched, names = sent(hub), list(shards(hub))
    assert sorted(set(fetched)) == names
    assert hub.cached & set(names) == (set() if more else set(names))
    if not more:
        assert len(fetched) == len(names)
    again = convert(hub, out, *more)
    assert "already converted" in again.out
    assert sent(hub) == []


def test_with_deletion_the_disk_holds_the_output_and_four_shards(hub, wanted, tmp_path):
    out = tmp_path / "out"
    with watched(out) as sizes:
        done = convert(hub, out, DELETE)
    assert done.code == 0, done.err
    assert_output_and_four_shards(hub, out, sizes)
    assert contents(out) == wanted


def test_with_deletion_shards_that_are_needed_one_after_the_other_are_fetched_once(hub, tmp_path):
    """One output shard is filled in the order of the source's, so none is needed again."""
    done = hub.run("convert", hub.id, tmp_path / "out", "--format", "nvfp4", DELETE)
    assert done.code == 0, done.err
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert sorted(sent(hub)) == list(shards(hub))


@contextmanager
def watched(folder):
    """A list of the bytes that a folder held meanwhile, about every millisecond."""
    sizes, is_over = [], threading.Event()

    def watch():
        while not is_over.is_set():
            sizes.append(taken(folder))
            time.sleep(0.001)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield sizes
    finally:
        is_over.set()
        watching.join()


def assert_output_and_four_shards(hub, out, sizes):
    output_bytes = taken(out)
    largest, total = max(shards(hub).values()), sum(shards(hub).values())
    # What huggingface_hub notes of each file, its locks and its tag of the folder.
    notes = 1024 * (len(shards(hub)) + 4)
    assert len(sizes) > 20
    assert max(sizes) <= output_bytes + 4 * largest + notes
    assert max(sizes) > output_bytes
    assert output_bytes + 4 * largest + notes < 0.8 * total + output_bytes


def taken(folder):
    """Bytes of all files, of which some go away meanwhile."""
    size_bytes = 0
    for inner, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                size_bytes += os.stat(f"{inner}/{file}").st_size  # noqa: PTH116 - a thousandfold
    return size_bytes


@pytest.mark.parametrize(
    ("more", "kills"),
    [
        ((), 2),
        ((DELETE,), 3),
        pytest.param((), 4, marks=pytest.mark.full),
        pytest.param((DELETE,), 10, marks=pytest.mark.full),
    ],
)
def test_killed_again_and_again_and_continued_makes_the_same_bytes(
    hub, wanted, tmp_path, more, kills
):
    """Each time while another shard is fetched, in the order in which they are first read."""
    out = tmp_path / "out"
    names = list(shards(hub))
    for number in range(kills):
        name = names[number] if more else min(set(names) - hub.cached)
        killed = convert(hub, out, *more, kill=name)
        assert killed.code == -9, (name, killed)
        assert not (out / "config.json").exists()
    done = convert(hub, out, *more)
    assert done.code == 0, done.err
    assert contents(out) == wanted


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.full)])
def test_what_kills_leave_behind_does_not_add_up_on_the_disk(hub, wanted, tmp_path, kills):
    """Half a shard each time, beside those that were whole."""
    out, names = tmp_path / "out", list(shards(hub))
    with watched(out) as sizes:
        for name in names[:kills]:
            assert convert(hub, out, DELETE, kill=name).code == -9
        done = convert(hub, out, DELETE)
    assert done.code == 0, done.err
    assert_output_and_four_shards(hub, out, sizes)
    assert contents(out) == wanted


def test_what_was_deleted_and_converted_is_not_fetched_again(hub, wanted, tmp_path):
    out, last = tmp_path / "out", list(shards(hub))[-2]
    assert convert(hub, out, DELETE, kill=last).code == -9
    finished = len((out / ".moequant" / "journal.jsonl").read_text().splitlines())
    assert finished >= 2
    hub.asked()
    done = convert(hub, out, DELETE)
    assert done.code == 0, done.err
    assert len(set(sent(hub))) <= len(shards(hub)) - 4
    assert contents(out) == wanted


def test_an_interrupt_ends_it_at_once_and_the_same_command_continues(hub, wanted, tmp_path):
    out, middle = tmp_path / "out", list(shards(hub))[4]
    done = convert(hub, out, DELETE, kill=middle, signal=SIGINT)
    assert done.code == 130
    assert "finished work is kept. To continue: moequant convert" in done.err
    assert convert(hub, out, DELETE).code == 0
    assert contents(out) == wanted


def test_a_shard_that_cannot_be_fetched_ends_it_and_the_same_command_continues(
    hub, wanted, tmp_path
):
    out, middle = tmp_path / "out", list(shards(hub))[4]
    hub.set(breaks={middle: 1})
    headers = hub.run("inspect", hub.id)
    assert headers.code == 0
    hub.set(damaged=[middle])
    lost = convert(hub, out, DELETE)
    assert lost.code == 3
    assert f"{hub.id}/{middle}: downloaded with SHA-256 " in lost.error
    assert "the damaged copy was removed: run the command again" in lost.error
    hub.set()
    done = convert(hub, out, DELETE)
    assert done.code == 0, done.err
    assert contents(out) == wanted


def test_a_commit_that_replaced_the_one_that_was_begun_is_not_mixed_with_it(hub, wanted, tmp_path):
    out, names = tmp_path / "out", list(shards(hub))
    assert convert(hub, out, DELETE, kill=names[4]).code == -9
    path = hub.folder / names[2]
    was, changed = path.read_bytes(), bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    hub.set(commit="f" * 40)
    refused = convert(hub, out, DELETE)
    assert refused.code == 1
    assert f"{hub.id}/{names[2]}: changed since the conversion into {out} began" in refused.error
    assert f"continue with --revision {'0123456789' * 4}, or start over" in refused.error
    path.write_bytes(was)
    hub.set()
    done = convert(hub, out, DELETE, "--revision", "0123456789" * 4)
    assert done.code == 0, done.err
    assert contents(out) == wanted


def test_a_conversion_goes_on_with_shards_in_the_cache_and_without_network(hub, wanted, tmp_path):
    out, names = tmp_path / "out", list(shards(hub))
    assert convert(hub, out, DELETE, kill=names[4]).code == -9
    whole = convert(hub, tmp_path / "other")
    assert whole.code == 0, whole.err
    hub.asked()
    done = convert(hub, out, HF_HUB_OFFLINE="1")
    assert done.code == 0, done.err
    assert hub.asked() == []
    assert contents(out) == wanted


def test_only_what_a_run_fetches_is_deleted(hub, tmp_path):
    refused = hub.run("convert", hub.folder, tmp_path / "out", "--format", "nvfp4", DELETE)
    assert refused.code == 2
    assert "a directory, but only shards that the conversion itself fetches" in refused.error
    assert list(shards(hub))
    assert convert(hub, tmp_path / "kept").code == 0
    assert convert(hub, tmp_path / "out", DELETE).code == 0
    assert set(shards(hub)) <= hub.cached


def test_what_is_fetched_into_a_folder_is_a_copy_of_what_the_cache_has(tmp_path, monkeypatch):
    repository = HubRepository(
        repo_id="owner/name", revision=None, commit="0" * 40,
        files={"shard": HubFile(size_bytes=3, sha256=None, blob_id="")},
    )  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = repository.snapshot / "shard"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"abc")

    def download(repo_id, file, *, revision, local_dir):
        return shutil.copy(cached, local_dir / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert repository.fetch("shard") == cached
    # A conversion deletes it, and must not delete what others put into the cache.
    assert repository.fetch("shard", folder) == folder / "shard"


def test_a_truncated_shard_in_the_cache_is_removed_and_fetched_again(hub, wanted, tmp_path):
    assert convert(hub, tmp_path / "first").code == 0
    name = list(shards(hub))[2]
    (path,) = hub.snapshots.rglob(name)
    with path.resolve().open("r+b") as file:
        file.truncate(1000)
    refused = convert(hub, tmp_path / "out")
    assert refused.code == 3
    assert "1000 bytes were downloaded" in refused.error
    assert "the damaged copy was removed: run the command again" in refused.error
    done = convert(hub, tmp_path / "out")
    assert done.code == 0, done.err
    assert contents(tmp_path / "out") == wanted


def test_the_plan_with_deletion_asks_for_room_for_four_shards_alone(hub, tmp_path):
    hub.set(sizes={"adapter_model.safetensors": 10**19})
    (hub.folder / "adapter_model.safetensors").write_text("x")
    found = convert(hub, tmp_path / "out", DELETE, "--dry-run", "--json")
    assert found.code == 0, found.err


def test_weights_that_others_predict_inputs_from_are_kept_until_they_were_read(
    hub, many_shards, tmp_path
):
    """Down is searched by mean squares that its expert's gate and up give, and the layer's norm."""
    option = ("--option", "search=gaussian")
    done = hub.run("convert", many_shards, tmp_path / "wanted", *SETTINGS, *option)
    assert done.code == 0, done.err
    done = convert(hub, tmp_path / "out", *option, DELETE)
    assert done.code == 0, done.err
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    names = list(shards(hub))
    assert sorted(set(sent(hub))) == names
