"""How shards follow one another: what is at work at once, and in which order it is recorded."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moequant.conversion import convert, memory, run
from moequant.conversion.journal import Journal
from moequant.conversion.run import _ResultBuffers
from moequant.errors import MoequantError
from moequant.progress import SilentProgress
from moequant.storage import writer
from moequant.storage.buffers import Arena
from moequant.storage.output_file import OutputFile
from moequant.storage.writer import ShardWriter

SETTINGS = {"format": "nvfp4", "max_shard_size": "200KB"}


@pytest.fixture(scope="module")
def source(make_checkpoint):
    return make_checkpoint()


@pytest.fixture
def recorded(monkeypatch):
    """Names of the shards that were recorded, in that order."""
    names, original = [], Journal.record

    def record(self, shard):
        original(self, shard)
        names.append(shard.file)

    monkeypatch.setattr(Journal, "record", record)
    return names


class Finishing:
    """Stands for `ShardWriter.finish`: slower for every other shard, and counts."""

    def __init__(self, monkeypatch):
        self._original = ShardWriter.finish
        self._lock = threading.Lock()
        self._now = 0
        self.calls = self.most = 0
        monkeypatch.setattr(ShardWriter, "finish", lambda writer: self(writer))

    def __call__(self, writer):
        with self._lock:
            self._now += 1
            self.calls += 1
            self.most = max(self.most, self._now)
            slow = self.calls % 2
        time.sleep(0.1 if slow else 0.02)
        try:
            return self._original(writer)
        finally:
            with self._lock:
                self._now -= 1


@pytest.mark.parametrize(("workers", "at_once"), [(1, 1), (7, 1), (8, 2), (16, 4)])
def test_one_shard_is_finished_at_a_time_for_each_four_workers(
    source, tmp_path, monkeypatch, recorded, workers, at_once
):
    finishing = Finishing(monkeypatch)
    result = convert(source, tmp_path / "out", workers=workers, **SETTINGS)
    planned = [shard.file for shard in result.plan.shards]
    assert len(planned) > 8
    assert finishing.most == at_once
    assert recorded == planned


def test_what_others_have_finished_when_one_fails_is_kept(
    source, tmp_path, monkeypatch, recorded, contents
):
    original = ShardWriter.finish

    def finish(writer):
        time.sleep(0.05)
        if writer.path.name.startswith("model-00002-"):
            raise MoequantError("the second fails")
        return original(writer)

    with monkeypatch.context() as context:
        context.setattr(ShardWriter, "finish", finish)
        with pytest.raises(MoequantError, match="the second fails"):
            convert(source, tmp_path / "out", workers=16, **SETTINGS)
    left = set(recorded)
    assert len(left) > 1
    assert not any(name.startswith("model-00002-") for name in left)
    recorded.clear()
    result = convert(source, tmp_path / "out", workers=2, **SETTINGS)
    assert result.resumed_shards == len(left)
    assert {*recorded} == {shard.file for shard in result.plan.shards} - left
    whole = convert(source, tmp_path / "whole", workers=1, **SETTINGS)
    assert contents(tmp_path / "out") == contents(whole.output)


def test_workers_leave_to_the_end_what_they_do_not_keep_up_with(
    source, tmp_path, monkeypatch, contents
):
    asked = []
    original = OutputFile.digest

    def digest(file, at_most_bytes):
        asked.append(at_most_bytes == file.size_bytes)
        # As if another worker was at it: nothing is digested until the shard is finished.
        if asked[-1]:
            original(file, at_most_bytes)

    monkeypatch.setattr(OutputFile, "digest", digest)
    result = convert(source, tmp_path / "out", workers=8, **SETTINGS)
    assert asked.count(True) == len(result.plan.shards)
    record = json.loads((result.output / "moequant.json").read_text())
    for file, entry in record["shards"].items():
        assert hashlib.sha256((result.output / file).read_bytes()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("stored", [None, "mxfp4"])
@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_results_are_shared_than_the_plan_has_memory_for(
    source, make_checkpoint, tmp_path, monkeypatch, workers, stored
):
    made, shared, settings = [], [], SETTINGS
    if stored is not None:
        # Parts that are joined lie in memory that grows with the first of them, to huge pages.
        plain = make_checkpoint(
            model_type="gpt_oss", layers=1, experts=6, hidden=1408, intermediate=1408
        )
        source = convert(plain, tmp_path / "source", format=stored).output
        settings = {"format": stored, "dialect": "gpt-oss"}
    initialize, share = _ResultBuffers.__init__, _ResultBuffers.share

    def noted(self, *arguments):
        made.append(self)
        initialize(self, *arguments)

    def counted(self, memory):
        release = share(self, memory)
        assert self._left_bytes >= 0
        shared.append(release is not None)
        return release

    monkeypatch.setattr(_ResultBuffers, "__init__", noted)
    monkeypatch.setattr(_ResultBuffers, "share", counted)
    monkeypatch.setattr(memory, "WRITE_BUFFER_BYTES", 1 << 16)
    result = convert(source, tmp_path / "out", workers=workers, **settings)
    assert any(shared)
    assert made[0]._shared_bytes == 0
    kept = sum(memory.size_bytes for memory in made[0]._kept)
    assert kept + made[0]._left_bytes == result.plan.memory.buffer_bytes(workers)


@pytest.fixture
def little_memory(monkeypatch):
    """Little may be shared, nearly everything is, and who waits for memory does not for ever."""
    monkeypatch.setattr(memory, "WRITE_BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(writer, "SHARED_BYTES", 1 << 10)
    original, until = _ResultBuffers.wait_for_room, time.monotonic() + 30

    def waited(self, seconds):
        assert time.monotonic() < until, "a worker waits for what nobody releases"
        return original(self, seconds)

    monkeypatch.setattr(_ResultBuffers, "wait_for_room", waited)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        # Parts of stacks: all of gate and up lie in front of what is down, all codes of scales.
        ({"model_type": "gpt_oss", "experts": 12}, {"format": "mxfp4", "dialect": "gpt-oss"}),
        # Scales that fill no lines of a cache lie behind everything else.
        ({"hidden": 208, "intermediate": 144, "experts": 12}, {"format": "nvfp4"}),
    ],
    ids=["stacks", "odd sizes"],
)
def test_nobody_waits_for_what_lies_beyond_a_hole_that_nobody_fills(
    make_checkpoint, tmp_path, little_memory, sizes, settings, workers, contents
):
    path = make_checkpoint(**sizes)
    result = convert(path, tmp_path / "out", workers=workers, **settings)
    many = convert(path, tmp_path / "many", workers=8, **settings)  # who do not keep pace
    assert contents(result.output) == contents(many.output)


def test_nobody_waits_for_a_worker_that_failed(source, tmp_path, monkeypatch, little_memory):
    convert_unit, first = run.convert_unit, threading.Lock()

    def convert_slowly(*arguments):
        if first.acquire(blocking=False):
            time.sleep(0.5)  # the other writes beyond this one's place meanwhile
            raise MoequantError("the first fails")
        return convert_unit(*arguments)

    monkeypatch.setattr(run, "convert_unit", convert_slowly)
    with pytest.raises(MoequantError, match="the first fails"):
        convert(source, tmp_path / "out", workers=2, format="nvfp4")


def test_a_thread_that_failed_fails_again_for_the_same_reason(source, tmp_path, monkeypatch):
    convert_unit = run.convert_unit

    def fail(*arguments):
        convert_unit(*arguments)
        raise MoequantError("all fail")

    monkeypatch.setattr(run, "convert_unit", fail)
    # One thread for all workers: it fails for one after the other.
    monkeypatch.setattr(run, "worker_pool", lambda workers: ThreadPoolExecutor(1))
    with pytest.raises(MoequantError, match="all fail"):
        convert(source, tmp_path / "out", workers=16, format="nvfp4")


def test_nobody_waits_for_what_is_shared_with_a_failed_shard(
    source, tmp_path, monkeypatch, little_memory
):
    digest, has_pending_work = OutputFile.digest, OutputFile.has_pending_work.fget

    def fails(file):
        return file.path.name.startswith("model-00002-")

    def fail(file, at_most_bytes):
        if fails(file) and at_most_bytes == file.size_bytes:
            raise MoequantError("the second fails")
        return not fails(file) and digest(file, at_most_bytes)

    monkeypatch.setattr(OutputFile, "digest", fail)
    # As if all that is shared with it lay beyond a hole.
    pending = property(lambda file: not fails(file) and has_pending_work(file))
    monkeypatch.setattr(OutputFile, "has_pending_work", pending)
    with pytest.raises(MoequantError, match="the second fails"):
        convert(source, tmp_path / "out", workers=2, format="nvfp4", max_shard_size="1MB")


def filled(results, size_bytes):
    memory = results.acquire(0)
    memory.empty((size_bytes,), dtype=torch.uint8)
    return memory


def test_memory_that_is_kept_gives_way_to_what_is_shared():
    results = _ResultBuffers(Arena()._allocate, 0, 30_000)
    first, second = filled(results, 10_000), filled(results, 1000)
    results.release(first)
    assert results.acquire(0) is first  # what came back goes out again
    first.clear()
    results.release(first)
    third = filled(results, 10_000)
    assert third is first
    keep = results.share(third)
    assert keep is not None
    assert results.share(filled(results, 12_000)) is None  # 14096 of 30000 are shared
    assert results.share(second) is not None
    keep()
    assert results.share(filled(results, 10_000)) is not None


@pytest.mark.parametrize(("owner", "step"), [(ShardWriter, "__init__"), (run._Run, "fill")])
def test_an_interrupt_between_two_steps_leaves_no_unfinished_file(
    source, tmp_path, monkeypatch, owner, step
):
    original = getattr(owner, step)

    def interrupted(*arguments, **named):
        original(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", workers=2, **SETTINGS)
    assert not list((tmp_path / "out").rglob("*.partial"))


class Steps(SilentProgress):
    """Notes how much was to be done, and was done of what."""

    def __init__(self):
        self.total, self.done = 0, []

    def start(self, description, total, *, unit="bytes"):
        self.total += total

    def advance(self, done, current):
        self.done.append((current, done))


def test_small_units_are_written_together_and_told_one_by_one(
    make_checkpoint, tmp_path, monkeypatch
):
    source = make_checkpoint(experts=24)
    written, original = [], ShardWriter.write_all

    def write_all(self, tensors, release=None):
        written.append(len(tensors))
        original(self, tensors, release)

    monkeypatch.setattr(ShardWriter, "write_all", write_all)
    steps = Steps()
    result = convert(source, tmp_path / "out", format="mxfp4", workers=1, progress=steps)
    units = result.plan.units
    # Codes and scales of gate and up, or of down.
    assert sum(written) == sum(2 * len(unit.weights) for unit in units)
    assert len(written) < len(units) / 2
    where = result.plan.model.whereabouts
    assert sorted(steps.done) == sorted((where(i.name), i.source_bytes) for i in result.plan.items)
    assert sum(done for _, done in steps.done) == steps.total
    layers = [current for current, _ in steps.done if current.startswith("layer ")]
    assert layers == sorted(layers)
    assert set(layers) == {"layer 1/2", "layer 2/2"}


def test_workers_that_run_are_waited_for_also_if_the_next_cannot_start(
    make_checkpoint, tmp_path, monkeypatch
):
    submit, abort, started = ThreadPoolExecutor.submit, ShardWriter.abort, []
    ended_at_abort = []

    def refuse_the_second(pool, function, *arguments):
        if function.__name__ != "_work":
            return submit(pool, function, *arguments)
        if started:
            raise RuntimeError("can't start new thread")

        def late():
            time.sleep(0.2)
            return function(*arguments)

        started.append(submit(pool, late))
        return started[0]

    def look(written):
        ended_at_abort.append(started[0].done())
        abort(written)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse_the_second)
    monkeypatch.setattr(ShardWriter, "abort", look)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        convert(make_checkpoint(), tmp_path / "out", format="nvfp4", workers=2)
    assert ended_at_abort == [True]
