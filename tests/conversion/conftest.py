"""Conversions that are struck by a fault, each in a process of its own, and what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moequant.native_code import UnavailableError
from moequant.quantizers import NativeQuantizer


@pytest.fixture(scope="session")
def struck():
    """struck(source, output, fault, **settings): what became of it; see fault_server.py."""
    server = Path(__file__).with_name("fault_server.py")
    with subprocess.Popen(
        [sys.executable, str(server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def struck(source, output, fault=None, **settings):
            arguments = {"source": str(source), "output": str(output), **settings}
            process.stdin.write(json.dumps({"arguments": arguments, **(fault or {})}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield struck
        process.stdin.close()


@pytest.fixture(scope="session")
def small_source(make_checkpoint, tmp_path_factory):
    """1.2 MB in three shards, with files that come along in a folder and without content."""
    path = tmp_path_factory.mktemp("small") / "source"
    make_checkpoint(path=path, layers=1, experts=2, vocabulary=64, shard_bytes=600_000)
    (path / "templates").mkdir()
    (path / "templates" / "chat.jinja").write_text("{{ messages }}")
    (path / "NOTICE").touch()
    return path


@pytest.fixture(scope="session")
def large_source(make_checkpoint, tmp_path_factory):
    """13 MB of experts so large that what becomes of them is written past the page cache."""
    path = tmp_path_factory.mktemp("large") / "source"
    return make_checkpoint(
        path=path, layers=1, experts=2, hidden=1024, intermediate=1024, vocabulary=64
    )


@pytest.fixture
def no_kernels(monkeypatch):
    """A machine on which no kernel compiles."""

    def refuse(function):
        raise UnavailableError("no LLVM on this machine")

    monkeypatch.setattr("moequant.native_code.jit.compile_function", refuse)
    monkeypatch.setattr("moequant.quantizers._native", NativeQuantizer)


@pytest.fixture
def past_cache():
    """past_cache(calls): numbers of those that write past the page cache."""

    def past_cache(calls):
        numbers = [number for number, call in enumerate(calls, start=1) if call == "direct_pwrite"]
        if not numbers:
            pytest.skip("no writes past the page cache, by system or file system")
        return numbers

    return past_cache


class Left:
    """What a conversion that was struck has left in its output."""

    def __init__(self, output):
        self.output = output
        self.files = snapshot(output)
        self.finished = dict(self._finished())

    def _finished(self):
        """Shards with a whole line in the journal: inode and modification time of each."""
        # Without a plan the conversion is whole, and only its work folder not quite gone.
        unfinished = ".moequant/plan.json" in self.files
        journal = self.files.get(".moequant/journal.jsonl", b"") if unfinished else b""
        for line in journal.splitlines(keepends=True):
            if line.endswith(b"\n"):
                file = json.loads(line)["file"]
                yield file, self.identity(file)

    def identity(self, file):
        """What tells whether a shard was written again."""
        for path in (self.output / ".moequant" / "shards" / file, self.output / file):
            if path.exists():
                return path.stat().st_ino, path.stat().st_mtime_ns
        return None

    def check_nothing_looks_whole(self, whole, old=None):
        """No config.json unless everything is there, no shard by its name that is not right."""
        if "config.json" in self.files:
            candidates = [whole] if old is None else [whole, old]
            assert any({f: self.files.get(f) for f in c} == c for c in candidates)
        for name, content in self.files.items():
            if name.endswith(".safetensors"):
                file = name.rpartition("/")[2]
                assert content in (whole.get(file), (old or {}).get(file)), name


@pytest.fixture
def left():
    """left(output): what is there, as `Left`."""
    return Left


def snapshot(folder):
    """Every file of a folder with its bytes."""
    folder = Path(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def contents():
    """contents(folder): every file with its bytes."""
    return snapshot
