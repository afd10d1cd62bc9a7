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

Exit code 0 if all is well, else 1. Everything stays on this machine: see served_vllm.py.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from memory_growth import Record, Sample
from memory_in_use import host_bytes
from served_vllm import MAX_TOKENS, START_S, complete, parse, serve

REFERENCES = 8
"""Prompts whose answers are compared."""
REFERENCE_TOKENS = 64
ABANDONED = 0.02
"""Share of requests whose client leaves while the answer is streamed."""
SAMPLE_S = 2
"""Between samples of memory."""


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
    memory: Record = field(default_factory=Record)

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
            "memory": {part: self.memory.in_windows(part) for part in ("gpu_bytes", "host_bytes")},
            "failed_requests": len(self.failures),
            "problems": self.problems + self.failures[:20],
        }


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
    while not done.wait(SAMPLE_S):
        found.memory.samples.append(
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
    found.seconds = found.memory.seconds = time.monotonic() - started
    done.set()
    watcher.join()
    if server.process.poll() is not None:
        found.problems.append(f"the server ended with exit code {server.process.returncode}")
        return found
    if not sum(found.requests.values()):
        found.problems.append("no request was answered")
    found.problems += found.memory.problems(gpu_known=server.gpu_known)
    after = answers(server, references, "end")
    for index, (first, last) in enumerate(zip(before, after, strict=True)):
        if first != last:
            found.problems.append(f"reference {index} was answered otherwise at the end")
    return found


def run(
    checkpoint, *, minutes, clients, alone=False, beside=False, options=(),
    start_s=START_S,
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


def command_line():
    """The parser of its own options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--alone", action="store_true", help="without the plug-in")
    parser.add_argument("--beside", action="store_true", help="other processes use the GPU, too")
    parser.add_argument("--json", type=Path, help="where to write the summary, too")
    return parser


def main():
    """See the head of this file."""
    parser = command_line()
    given = parse(parser, sys.argv[1:])
    if not (given.checkpoint / "config.json").is_file():
        parser.error(f"{given.checkpoint}: no config.json is there; name a converted checkpoint")
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
