"""Memory that a server uses: of its processes, and of GPUs by all or by the server alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_REPORTER = Path(__file__).parent / "server_memory"


def processes_of(session):
    """Ids of the processes of a session, such as the server's."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                # Behind the name, which may hold anything: state, parent, group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    yield int(entry.name)


def host_bytes(session):
    """Memory of all processes of a session, without what they share with files."""
    total = 0
    for pid in processes_of(session):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
    return total


def gpu_bytes():
    """Memory in use of all GPUs; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return sum(map(int, done.stdout.split())) << 20 if done.returncode == 0 else None


def reporting_to(folder):
    """Variables with which processes write what torch's allocator holds into files of a folder."""
    paths = [str(_REPORTER), os.environ.get("PYTHONPATH", "")]
    return {
        "MOEQUANT_SERVER_MEMORY": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def torch_bytes(folder):
    """What torch's allocator holds in all processes that report to a folder; None without any."""
    return sum(int(file.read_text()) for file in folder.glob("[0-9]*")) or None
