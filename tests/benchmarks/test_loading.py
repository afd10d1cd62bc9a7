from __future__ import annotations

import pytest
import torch

from moequant.benchmarks import loading
from moequant.benchmarks.loading import bench_loading
from moequant.conversion import convert
from moequant.errors import CheckpointError
from moequant.preparation import prepare
from moequant.storage.buffers import tensor_bytes


@pytest.fixture(scope="module")
def converted(make_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("w4a8") / "out"
    output = convert(make_checkpoint(), path, format="w4a8").output
    prepare(output, target="sm90")
    return output


@pytest.fixture
def read(monkeypatch):
    """What the plain reads of one thread read: (file name, start, bytes), in order."""
    seen = []
    read_into = loading.Span.read_into

    def kept(span, buffer):
        count = read_into(span, buffer)
        seen.append((span.file.path.name, span.start, bytes(tensor_bytes(buffer[:count]))))
        return count

    monkeypatch.setattr(loading.Span, "read_into", kept)
    monkeypatch.setattr(loading, "_THREADS", (1,))
    return seen


def test_it_times_the_checkpoint_and_its_prepared_folders(converted):
    document = bench_loading(converted, device="cpu", rounds=2)
    assert document["layers"] == 2
    assert [row["prepared_for"] for row in document["folders"]] == [None, "sm90"]
    for row in document["folders"]:
        assert row["load_s"] > 0
        assert row["share"] == pytest.approx(row["plain_s"] / row["load_s"])
        assert row["plain_threads"] in (1, 2, 4, 8, 16)
        assert row["activations"] == ["fp8_token"]
    assert [row["layout"] for row in document["folders"]] == [["stacked"], ["w4a8_panels"]]


def test_the_plain_read_has_the_bytes_of_the_experts_and_no_others(converted, read, monkeypatch):
    monkeypatch.setattr(loading, "_PIECE_BYTES", 1000)
    document = bench_loading(converted, device="cpu", rounds=1)
    sizes = [row["bytes"] for row in document["folders"]]
    assert sum(len(data) for _, _, data in read) == sum(sizes)
    assert len({(name, start) for name, start, _ in read}) == len(read)
    for name, start, data in read:
        (path,) = converted.rglob(name)
        with path.open("rb") as file:
            file.seek(start)
            assert file.read(len(data)) == data


def test_a_folder_that_is_not_loaded_is_named_with_the_reason(converted, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    next(copy.rglob("moequant-prepared/sm90/*.safetensors")).unlink()
    whole, broken = bench_loading(copy, device="cpu", rounds=1)["folders"]
    assert "error" not in whole
    assert "prepare" in broken["error"]


def test_a_folder_that_cannot_be_searched_is_named_and_the_others_are_timed(converted, forbid):
    forbid(converted / "moequant-prepared" / "sm90")
    whole, closed = bench_loading(converted, device="cpu", rounds=1)["folders"]
    assert "error" not in whole
    assert "sm90: cannot be searched: Permission denied; check its permissions" in closed["error"]


def test_a_folder_of_prepared_ones_that_cannot_be_listed_is_refused(converted, forbid):
    forbid(converted / "moequant-prepared")
    with pytest.raises(CheckpointError, match=r"cannot be listed: Permission denied; check its"):
        bench_loading(converted, device="cpu", rounds=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_reads_to_a_gpu(converted):
    document = bench_loading(converted, device="cuda", rounds=1)
    assert all("error" not in row for row in document["folders"])
    assert "gpu" in document["machine"]
