"""A running `vllm serve` of this machine: how it starts, is asked over HTTP, and ends.

It listens on 127.0.0.1. Nothing but Python's own library is needed beside vLLM.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "shared")]

from free_port import HOST, free_port
from memory_in_use import gpu_bytes, reporting_to, torch_bytes
from process_group import end_group

MAX_TOKENS = 2048
"""Of a prompt and its answer."""
START_S = 600
_REQUEST_S = 120
_STOP_S = 30


def parse(parser, words):
    """What a command line says: of the parser, the checkpoint, and `options` of `vllm serve`."""
    parser.add_argument("checkpoint", type=Path, help="a converted checkpoint")
    parser.epilog = "What follows the first -- is given to vllm serve."
    cut = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:cut])
    given.options = words[cut + 1 :]
    return given


class Server:
    """A running `vllm serve`.

    `gpu_bytes` returns memory of the GPUs, None where it is unknown; with `gpu_known`, that fails.
    """

    def __init__(self, process, port, model, gpu_bytes, *, gpu_known):
        self.process, self.port, self.model = process, port, model
        self.gpu_bytes, self.gpu_known = gpu_bytes, gpu_known

    def connect(self):
        """A connection."""
        return http.client.HTTPConnection(HOST, self.port, timeout=_REQUEST_S)

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
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--host", HOST,
        "--port", str(port), "--served-model-name", "soak", "--skip-tokenizer-init",
        "--max-model-len", str(MAX_TOKENS), *([] if alone else ["--quantization", "moequant"]),
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_PLUGINS": "" if alone else "moequant"}
    if beside:
        environment |= reporting_to(memory)
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
        process.wait(_STOP_S)
    end_group(process)


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
