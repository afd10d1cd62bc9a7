"""Serve a checkpoint with vLLM for some minutes, to many clients, and check that it stays well.

    soak.py CHECKPOINT [--minutes 10] [--clients 64] [--alone] [--beside] [--json OUT] [-- OPTIONS]

OPTIONS are those of `vllm serve`.

Prompts are token ids, so that no tokenizer is needed, and go through the server's HTTP interface:
short and long ones, some beginning alike, answers of 1 to 128 tokens, greedy and sampled, whole and
streamed, a few of which the client abandons. It fails if

* a request is not answered with 200 and as many tokens as were asked for,
* the server ends, or does not start,
* memory of the GPU or of the server's processes grows, from the middle of the time to its end; with
  --beside, where other processes use the GPU, what torch holds of it in the server's,
* the same prompt, greedy and by itself, has another answer at the end than at the start.

Exit code 0 if all is well, else 1. Everything stays on this machine: the server listens on
127.0.0.1. Nothing but Python's own library is needed beside vLLM.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
HERE = Path(__file__).parent
MAX_TOKENS = 2048
"""Of a prompt and its answer."""
REFERENCES = 8
"""Prompts whose answers are compared."""
REFERENCE_TOKENS = 64
ABANDONED = 0.02
"""Share of requests whose client leaves while the answer is streamed."""
GPU_GROWTH_BYTES = 64 << 20
"""vLLM takes its memory when it starts; what torch's allocator takes later comes in blocks of 2 to
20 MiB, and all kinds of requests have come before the middle of the time."""
HOST_LEAK_BYTES = 4096
"""That the server's processes may keep of a request: less is no leak that this finds.

docs/serving.md has 28,562 and 26,493 requests in ten minutes, 48 and 44 a second: 11,400 and 10,600
in the 40 % of the time between the ends of the windows, so that 47 and 43 MB are allowed for them.
"""
HOST_NOISE_BYTES = 26 << 20
"""That they may grow however few requests there were.

In those two runs, of which no leak is known, they grew by 6 and 13 MB. Two runs do not say how far
others are from them, so it is twice the larger. With 11,400 requests a leak of 4096 B + 26 MiB /
11,400 = 6.5 kB a request is found, whatever the noise; in a short run, only a larger one.
"""
_SECONDS = {"start": 600, "request": 120, "sample": 2, "stop": 30}


class Sample(NamedTuple):
    """Memory of a server at a time.

    Attributes:
        seconds: since the first request.
        requests: that had ended.
        gpu_bytes: of the GPUs, None if unknown.
        host_bytes: of the server's processes.
    """

    seconds: float
    requests: int
    gpu_bytes: int | None
    host_bytes: int


@dataclass
class Found:
    """What happened."""

    seconds: float = 0.0
    requests: Counter = field(default_factory=Counter)
    tokens: int = 0
    latencies_s: list = field(default_factory=list)
    problems: list = field(default_factory=list)
    """Of the server as a whole."""
    failures: list = field(default_factory=list)
    """Of single requests."""
    memory: list = field(default_factory=list)
    """Samples, the earliest first."""

    def summary(self):
        """A JSON document; well if there are no problems and no failures."""
        latencies = sorted(self.latencies_s) or [0.0]
        return {
            "ok": not self.problems and not self.failures,
            "seconds": round(self.seconds, 1),
            "requests": dict(self.requests),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "latency_s": {
                "median": round(statistics.median(latencies), 3),
                "p99": round(latencies[int(0.99 * (len(latencies) - 1))], 3),
            },
            "memory": {
                part: [largest(self, window, part) for window in WINDOWS]
                for part in ("gpu_bytes", "host_bytes")
            },
            "failed_requests": len(self.failures),
            "problems": self.problems + self.failures[:20],
        }


WINDOWS = ((0.4, 0.6), (0.8, 1.0))
"""The middle and the end of the time."""


def largest(found, window, part):
    """The largest number of samples within a part of the time; None if there is none."""
    begin, end = (share * found.seconds for share in window)
    samples = [sample for sample in found.memory if begin <= sample.seconds <= end]
    return max((n for n in (getattr(s, part) for s in samples) if n is not None), default=None)


def allowed_host_growth(found):
    """Bytes by which the processes may grow from the end of one window to that of the other."""
    before, after = (largest(found, window, "requests") or 0 for window in WINDOWS)
    return HOST_LEAK_BYTES * (after - before) + HOST_NOISE_BYTES


def check_memory(found, *, gpu_known=False):
    """Add a problem if memory grew, or was not measured; of the GPU only if it is known."""
    host = "the server's processes", "host_bytes", allowed_host_growth(found), True
    for name, part, allowed, known in (("the GPU", "gpu_bytes", GPU_GROWTH_BYTES, gpu_known), host):
        before, after = (largest(found, window, part) for window in WINDOWS)
        if before is None or after is None:
            if known:
                found.problems.append(f"memory of {name} was not measured")
        elif after > before + allowed:
            found.problems.append(
                f"memory of {name} grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB, more than "
                f"the {allowed / 1e6:.0f} MB allowed"
            )


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


def torch_bytes(folder):
    """What torch's allocator holds in all processes that say so; see server_memory."""
    return sum(int(file.read_text()) for file in folder.glob("[0-9]*")) or None


class Server:
    """A running `vllm serve`.

    `gpu_bytes` returns memory of the GPUs, None where it is unknown; with `gpu_known`, that fails.
    """

    def __init__(self, process, port, model, gpu_bytes, *, gpu_known):
        self.process, self.port, self.model = process, port, model
        self.gpu_bytes, self.gpu_known = gpu_bytes, gpu_known

    def connect(self):
        """A connection."""
        return http.client.HTTPConnection(HOST, self.port, timeout=_SECONDS["request"])

    def is_up(self):
        """Whether it answers."""
        with suppress(OSError, http.client.HTTPException), closing(self.connect()) as connection:
            connection.request("GET", "/health")
            with connection.getresponse() as response:
                return response.status == 200
        return False


@contextmanager
def serve(checkpoint, log, *, alone, beside, options, start_s):
    """Start `vllm serve` on a free port, wait until it answers, and end it with its processes."""
    memory = Path(tempfile.mkdtemp(prefix="memory-", dir=log.parent))
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--host", HOST,
        "--port", str(port), "--served-model-name", "soak", "--skip-tokenizer-init",
        "--max-model-len", str(MAX_TOKENS), *([] if alone else ["--quantization", "moequant"]),
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_PLUGINS": "" if alone else "moequant"}
    if beside:
        environment["MOEQUANT_SERVER_MEMORY"] = str(memory)
        paths = [str(HERE / "server_memory"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        measure = partial(torch_bytes, memory) if beside else gpu_bytes
        server = Server(process, port, "soak", measure, gpu_known=beside)
        try:
            wait_for(server, start_s)
            yield server
        finally:
            stop(process)


def wait_for(server, start_s):
    """Wait until the server answers; RuntimeError if it does not."""
    deadline = time.monotonic() + start_s
    while not server.is_up():
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server did not answer within {start_s:g} s")
        time.sleep(0.2)


def stop(process):
    """End the server, then whatever is left of the processes it started."""
    with suppress(ProcessLookupError):
        process.terminate()  # unlike SIGINT, not ignored where this was started with `&`
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS["stop"])
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def complete(server, request, *, abandon=False):
    """Send a completion; returns its token ids, None where the client left; raises RuntimeError."""
    body = json.dumps({"model": server.model, "return_token_ids": True, **request})
    with closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
            if request.get("stream"):
                return read_stream(response, abandon=abandon)
            return json.loads(response.read())["choices"][0]["token_ids"]


def read_stream(response, *, abandon):
    """The token ids of a stream; None where the client leaves after the first."""
    ids = []
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"error within a stream: {str(event['error'])[:300]}")
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            if abandon:
                return None
    return ids


class Prompts:
    """Random requests of every kind."""

    def __init__(self, vocabulary, seed):
        self.random = random.Random(seed)  # noqa: S311 - not for secrets
        self.ids = range(3, vocabulary)
        common = random.Random(0)  # noqa: S311 - likewise
        self.beginnings = [common.choices(self.ids, k=256) for _ in range(4)]

    def draw(self):
        """A request, and whether its client leaves."""
        new = self.random.randint(1, 128)
        length = self.random.choice([(1, 32), (33, 256), (257, MAX_TOKENS - 128)])
        prompt = self.random.choices(self.ids, k=self.random.randint(*length))
        if self.random.random() < 0.25:  # for prefix caching
            beginning = self.random.choice(self.beginnings)
            prompt = (beginning + prompt)[: MAX_TOKENS - 128]
        request = {"prompt": prompt, "max_tokens": new, "ignore_eos": True}
        request["temperature"] = self.random.choice([0.0, 0.8])
        request["stream"] = self.random.random() < 0.5
        abandon = request["stream"] and new > 1 and self.random.random() < 2 * ABANDONED
        return request, abandon

    def references(self):
        """Requests whose answers are compared; nothing of them is cached."""
        for index in range(REFERENCES):
            length = 16 * 2**index if index < 6 else 48 * index
            yield {
                "prompt": self.random.choices(self.ids, k=length),
                "max_tokens": REFERENCE_TOKENS,
                "temperature": 0.0,
                "ignore_eos": True,
            }


def answers(server, references, when):
    """The answers to the references, one after the other, without the cache of others."""
    return [complete(server, {**r, "cache_salt": f"{when} {i}"}) for i, r in enumerate(references)]


def client(server, prompts, until, found, lock):
    """Send requests until the time is over or the server has ended."""
    while time.monotonic() < until and server.process.poll() is None:
        request, abandon = prompts.draw()
        kind = "abandoned" if abandon else "streamed" if request["stream"] else "whole"
        started = time.monotonic()
        problem, ids = None, None
        try:
            ids = complete(server, request, abandon=abandon)
            if ids is not None and len(ids) != request["max_tokens"]:
                problem = f"{len(ids)} tokens instead of {request['max_tokens']}, {kind}"
        except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
            problem = f"{kind}: {type(error).__name__}: {error}"
        with lock:
            found.requests[kind] += 1
            found.tokens += len(ids or ())
            found.latencies_s.append(time.monotonic() - started)
            if problem is not None:
                found.failures.append(problem)


def watch(server, started, done, found):
    """Sample memory until `done` is set."""
    while not done.wait(_SECONDS["sample"]):
        found.memory.append(
            Sample(
                seconds=time.monotonic() - started,
                requests=len(found.latencies_s),
                gpu_bytes=server.gpu_bytes(),
                host_bytes=host_bytes(server.process.pid),
            )
        )


def soak(server, *, seconds, clients, vocabulary):
    """Everything that is checked of a running server."""
    found, lock, done = Found(), threading.Lock(), threading.Event()
    references = list(Prompts(vocabulary, "references").references())
    before = answers(server, references, "start")
    started = time.monotonic()
    threads = [
        threading.Thread(
            target=client,
            args=(server, Prompts(vocabulary, seed), started + seconds, found, lock),
        )
        for seed in range(clients)
    ]
    watcher = threading.Thread(target=watch, args=(server, started, done, found))
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.monotonic() - started
    done.set()
    watcher.join()
    if server.process.poll() is not None:
        found.problems.append(f"the server ended with exit code {server.process.returncode}")
        return found
    if not sum(found.requests.values()):
        found.problems.append("no request was answered")
    check_memory(found, gpu_known=server.gpu_known)
    after = answers(server, references, "end")
    for index, (first, last) in enumerate(zip(before, after, strict=True)):
        if first != last:
            found.problems.append(f"reference {index} was answered otherwise at the end")
    return found


def run(
    checkpoint, *, minutes, clients, alone=False, beside=False, options=(),
    start_s=_SECONDS["start"],
):  # fmt: skip
    """Serve and soak; returns the summary, with the end of the server's log if it is not well."""
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            with serve(
                checkpoint, log, alone=alone, beside=beside, options=options, start_s=start_s
            ) as server:
                found = soak(server, seconds=60 * minutes, clients=clients, vocabulary=vocabulary)
        except (RuntimeError, OSError, http.client.HTTPException) as error:
            found = Found(problems=[f"{type(error).__name__}: {error}"])
        summary = found.summary()
        text = log.read_text(errors="replace")
        if not alone and "moequant runs routed experts" not in text:
            summary["problems"].append("the server did not say that moequant runs its experts")
            summary["ok"] = False
        if not summary["ok"]:
            summary["log"] = text[-4000:]
    return summary


def parse(words):
    """What a command line says; OPTIONS are all behind the first --."""
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--alone", action="store_true", help="without the plug-in")
    parser.add_argument("--beside", action="store_true", help="other processes use the GPU, too")
    parser.add_argument("--json", type=Path, help="where to write the summary, too")
    given = parser.parse_args(words[:cut])
    given.options = words[cut + 1 :]
    return given


def main():
    """See the head of this file."""
    given = parse(sys.argv[1:])
    summary = run(
        given.checkpoint, minutes=given.minutes, clients=given.clients, alone=given.alone,
        beside=given.beside, options=given.options,
    )  # fmt: skip
    text = json.dumps(summary, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    sys.exit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    main()
