"""A hub of the tests' own, and commands that are run against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

HERE = Path(__file__).parent


class Server:
    """A program of this folder that answers lines with lines."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / program), *arguments],
            env={**kept, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def error(self) -> str:
        """The message: the last line, after what the hub's library says of its attempts."""
        assert "Traceback" not in self.err
        line = self.err.splitlines()[-1]
        assert line.startswith("Error: "), self.err
        return line


class Hub:
    """One repository of the hub, and commands that are run against it."""

    def __init__(self, hub: Server, commands: Server, root: Path, id: str, home: Path) -> None:
        self._hub, self._commands = hub, commands
        self.id = id
        self.folder = root / id
        self.home = home
        self.folder.mkdir(parents=True)

    def set(self, **settings: Any) -> None:
        self._hub.ask({"set": {self.id: settings}})

    def asked(self) -> list[dict[str, Any]]:
        """What was sent of this repository since the last call: file, first byte, bytes."""
        return [e for e in self._hub.ask({"take": "log"}) if e["repository"] == self.id]

    def uploaded(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Large files that were sent since then, by digest, and commits and what else was made."""
        asked = self.asked()
        sent = [e["sent"].removeprefix("sha256:") for e in asked if "sent" in e]
        return sent, [e for e in asked if "commit" in e or "created" in e]

    def run(
        self, *arguments: object, kill: str = "", signal: int = SIGKILL, **environment: str
    ) -> Done:
        """Run a command; it gets a signal when half of the large file `kill` has been sent."""
        request = {"arguments": [*map(str, arguments)], "environment": environment}
        pid = self._commands.ask(request)
        if kill:
            self.set(kill=[pid, kill, signal])
        done = Done(*self._commands.ask({}))
        if kill:
            self.set()
        return done

    @property
    def snapshots(self) -> Path:
        """The commits of the repository in the hub's cache."""
        return self.home / "hub" / f"models--{self.id.replace('/', '--')}" / "snapshots"

    @property
    def cached(self) -> set[str]:
        """Names of the files in the hub's cache."""
        return {path.name for path in self.snapshots.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    root, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    hub = Server("hub_server.py", str(root))
    commands = Server(
        "command_server.py",
        HF_ENDPOINT=hub.read(),
        HF_HOME=str(home),
        XDG_CACHE_HOME=str(home),
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DOWNLOAD_TIMEOUT="5",
        no_proxy="127.0.0.1,localhost",
    )
    yield hub, commands, root, home
    commands.close()
    hub.close()


@pytest.fixture
def hub(servers, request):
    """An empty repository of its own on the hub."""
    hub, commands, root, home = servers
    name = f"owner/{request.node.name.replace('[', '-').replace(']', '')[:80]}"
    return Hub(hub, commands, root, name, home)
