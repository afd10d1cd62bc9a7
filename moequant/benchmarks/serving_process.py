"""Run a job of `serving_job` in a process of its own, and end all that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moequant.errors import MoequantError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOG_END = 2000
"""Characters of a failed job's output that are kept."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of every process: vLLM's log says who runs the experts, and nothing uses the network."""
_WHAT = {"machine": "measuring this machine", "model": "writing the model of random weights"}
"""What errors call the jobs that belong to no engine."""


def run_or_raise(
    job: str, request: Mapping[str, Any], place: Path, *, timeout_s: float
) -> dict[str, Any]:
    """Run a job that belongs to no engine; returns what it found.

    Args:
        job: "machine" or "model".
        request: as for `run_job`.
        place: likewise.
        timeout_s: likewise.

    Raises:
        UnsupportedError: the job refused what it was asked for, such as a device.
        MoequantError: it failed, or did not end in time.
    """
    found, log = run_job(job, request, place, what=_WHAT[job], timeout_s=timeout_s)
    if found.get("unsupported"):
        raise UnsupportedError(found["error"])
    if "error" in found:
        end = log.strip()[-LOG_END:]
        printed = f"it printed last:\n{end}" if end else "it printed nothing"
        raise MoequantError(f"{found['error']}; {printed}")
    return found


def run_job(
    job: str,
    request: Mapping[str, Any],
    place: Path,
    *,
    what: str,
    timeout_s: float,
    plugins: str = "",
) -> tuple[dict[str, Any], str]:
    """Run a job of `serving_job` in a new process; returns what it found, and what it printed.

    What it found has the key `error` if it failed or did not end in time.

    Args:
        job: its name.
        request: what it is given.
        place: an existing folder for files.
        what: what errors call it, such as the name of the engine.
        timeout_s: seconds after which it is ended, with all processes that it started.
        plugins: value of VLLM_PLUGINS; empty loads none.
    """
    files = [place / f"{job}.{name}" for name in ("request.json", "result.json", "log")]
    asked, told, log = files
    asked.write_text(json.dumps(request))
    told.unlink(missing_ok=True)
    command = [sys.executable, "-m", "moequant.benchmarks.serving_job", job, str(asked), str(told)]
    environment = {**os.environ, **_ENVIRONMENT, "VLLM_PLUGINS": plugins}
    with log.open("wb") as output:
        # A session of its own, because engines start processes, which must end with it.
        process = subprocess.Popen(  # noqa: S603 - ourselves
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        error = None
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            error = f"{what} did not end within {timeout_s:g} s; allow more by --timeout"
        finally:
            _end(process)
    text = log.read_text(errors="replace")
    if told.exists() and error is None:
        found: dict[str, Any] = json.loads(told.read_text())
        return found, text
    if error is None:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        error = f"{what} ended with exit code {process.returncode}: {last.strip()}"
    return {"error": error}, text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and of those it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
