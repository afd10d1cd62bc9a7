"""A download from the hub that is cut off goes on where it stopped, and says so if it cannot."""

from __future__ import annotations

import hashlib
import json

import pytest

SHARD = "model-00001-of-00003.safetensors"
"""Of the embedding, larger than two of the library's chunks of 10 MiB."""


@pytest.fixture
def large(hub, make_checkpoint):
    make_checkpoint(path=hub.folder, layers=1, experts=2, vocabulary=48_000, shard_bytes=25_000_000)
    return hub


def convert(hub, out):
    return hub.run("convert", hub.id, out, "--format", "nvfp4", "--hash-source")


def sent(hub):
    """File and first byte of each answer with a file's bytes, apart from headers of weights."""
    asked = hub.asked()
    is_header = [e["file"].endswith(".safetensors") and e["bytes"] <= 1 << 17 for e in asked]
    return [
        (e["file"], e["first"])
        for e, h in zip(asked, is_header, strict=True)
        if e["file"] and not h
    ]


def test_a_cut_connection_is_resumed_where_it_broke(large, tmp_path):
    large.set(breaks={SHARD: 1}, breaks_headers=False)
    done = convert(large, tmp_path / "out")
    assert done.code == 0, done.err
    asked = sent(large)
    assert [first for file, first in asked if file == SHARD] == [0, 10 << 20]
    assert len(asked) == len(list(large.folder.iterdir())) + 1
    source = json.loads((tmp_path / "out" / "moequant.json").read_text())["source"]
    assert (source["repository"], source["commit"]) == (large.id, "0123456789" * 4)
    assert source["content_sha256"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(large.folder.glob("*.safetensors"))
    }


def test_a_network_that_is_gone_is_an_error_and_the_same_command_goes_on(large, tmp_path):
    out = tmp_path / "out"
    large.set(headers_only=[SHARD])
    lost = convert(large, out)
    assert lost.code == 3
    assert "run the same command again to fetch the missing files" in lost.error
    assert not (out / "config.json").exists()
    fetched = large.cached
    assert "config.json" in fetched
    large.set()
    large.asked()
    done = convert(large, out)
    assert done.code == 0, done.err
    # Whole files of the first run are not fetched again.
    again = {file for file, _ in sent(large)}
    assert SHARD in again
    assert not again & fetched
