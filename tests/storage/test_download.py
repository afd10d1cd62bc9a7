"""A download from the hub that is cut off goes on where it stopped, and says so if it cannot."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789" * 4
REPOSITORY = "owner/name"
SHARD = "model-00001-of-00003.safetensors"
"""The one that breaks: of the embedding, larger than two of the library's chunks of 10 MiB."""


class Hub(ThreadingHTTPServer):
    """The part of the hub that a download asks for, over one folder; it may break off."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.breaks_left = 0
        """How many answers with SHARD's bytes end in their middle."""
        self.is_down = False
        """Whether SHARD cannot be had at all."""
        self.asked: list[tuple[str, int]] = []
        """File and first byte of every request for bytes."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        file = self.path.partition("/resolve/")[2].partition("/")[2]
        if file:
            self.send_file(file, with_body=with_body)
            return
        entries = [{"rfilename": name} for name in self.server.files]
        if "/tree/" in self.path:
            sizes = {name: (self.server.folder / name).stat().st_size for name in self.server.files}
            entries = [
                {"type": "file", "path": name, "size": size, "oid": name}
                for name, size in sizes.items()
            ]
        info = {"id": REPOSITORY, "sha": COMMIT, "siblings": entries}
        content = json.dumps(entries if "/tree/" in self.path else info).encode()
        self.send_content(200, content, {"Content-Type": "application/json"})

    def send_file(self, file: str, *, with_body: bool) -> None:
        content = (self.server.folder / file).read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        first = int((re.findall(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["0"])[0])
        if not with_body:
            self.send_content(200, content, headers, with_body=False)
            return
        self.server.asked.append((file, first))
        if self.server.is_down and file == SHARD:
            self.send_content(503, b"", {})
            return
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        stop = None
        if file == SHARD and self.server.breaks_left:
            self.server.breaks_left -= 1
            stop = (len(content) - first) // 2
        self.send_content(206 if first else 200, content[first:], headers, stop=stop)

    def send_content(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        *,
        with_body: bool = True,
        stop: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content[:stop])
        if stop is not None:
            self.wfile.flush()
            self.close_connection = True


@pytest.fixture
def hub(make_checkpoint, tmp_path):
    folder = tmp_path / "repository"
    make_checkpoint(path=folder, layers=1, experts=2, vocabulary=48_000, shard_bytes=25_000_000)
    with Hub(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def convert(hub: Hub, tmp_path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's library reads its variables when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-m", "moequant", "convert", REPOSITORY, str(out)]
    return subprocess.run(
        [*command, "--format", "nvfp4", "--hash-source"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_cut_connection_is_resumed_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_left = 1
    done = convert(hub, tmp_path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [first for file, first in hub.asked if file == SHARD] == [0, 10 << 20]
    assert len(hub.asked) == len(hub.files) + 1
    record = json.loads((tmp_path / "out" / "moequant.json").read_text())
    source = record["source"]
    assert (source["repository"], source["commit"]) == (REPOSITORY, COMMIT)
    assert source["content_sha256"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(hub.folder.glob("*.safetensors"))
    }


def test_a_network_that_is_gone_is_an_error_and_the_same_command_goes_on(
    hub: Hub, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hub.is_down = True
    lost = convert(hub, tmp_path, out)
    assert lost.returncode == 3, lost.stderr
    assert "Traceback" not in lost.stderr
    assert "run the same command again to fetch the missing files" in lost.stderr
    assert not out.exists()
    fetched = {file for file, _ in hub.asked} - {SHARD}
    hub.is_down = False
    hub.asked.clear()
    done = convert(hub, tmp_path, out)
    assert done.returncode == 0, done.stderr
    # Whole files of the first run are not fetched again.
    assert SHARD in {file for file, _ in hub.asked}
    assert not {file for file, _ in hub.asked} & (fetched - {SHARD})
