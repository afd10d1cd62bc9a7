"""Runs commands in children of one process, which has imported and compiled all that they need.

Reads a JSON request a line: `arguments` of a command, and `environment` to add. Answers with the
child's process id and, once another line has started it, with its exit code (negative: the signal),
stdout and stderr.
Waits of the hub's library between two attempts are cut short.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download  # noqa: F401

from moequant.benchmarks.random_checkpoint import write_demo_checkpoint
from moequant.cli import main
from moequant.conversion import convert
from moequant.preparation import PreparedCheckpoint  # noqa: F401

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    write_demo_checkpoint(Path(folder, "source"))
    convert(Path(folder, "source"), Path(folder, "out"), format="nvfp4", workers=1)
_sleep = time.sleep
time.sleep = lambda seconds: _sleep(min(seconds, 0.02))


def run(request, out, err):
    # torch makes its pool anew at the first call in a forked process, and fails if threads, which
    # call this when they first compute, do so at once.
    torch.set_num_threads(1)
    os.environ.update(request.get("environment", {}))
    # A shell that starts pytest behind & has its processes ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    constants.HF_HUB_OFFLINE = "HF_HUB_OFFLINE" in os.environ
    constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
    sys.argv = ["moequant", *request["arguments"]]
    try:
        main()
    except SystemExit as error:
        return error.code or 0
    return 0


for line in sys.stdin:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        waiting, start = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.read(waiting, 1)
                code = run(json.loads(line), out, err)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        sys.stdin.readline()
        os.write(start, b"!")
        os.close(start)
        os.close(waiting)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, out.read_text(), err.read_text()]), flush=True)
