"""Runs conversions and the like in children of one process: hundreds of faults take seconds.

Reads a JSON request a line, writes a JSON answer a line. Importing torch and compiling are paid for
once: each request is served by a fork, in which the n-th call that changes the disk fails or kills,
or which is killed from outside after a while.

A request holds `arguments` for `convert`, or for `calibrate` if these have `data`, or for `prepare`
if they have `target`, and may hold

    at        which call that changes the disk is struck, counted from 1
    kill      kill the process there, with SIGKILL
    errno     or let the call fail with this error ...
    lasting   ... and every later one that takes space on the disk, too: the disk stays full
    after     or kill the process after so many seconds

An answer holds `calls`, the calls made; `state` and `resumed` of a run that came to its end
(`prepare` resumes nothing); `error`, its type, and `message` of one that did not; or `killed`.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import tempfile
import threading

import torch

from moequant.calibration import calibrate
from moequant.conversion import convert
from moequant.preparation import prepare

PAST_CACHE = "direct_pwrite"
TAKES_SPACE = (
    "open", "write", "pwrite", "pwritev", "posix_fallocate", "ftruncate", "mkdir", PAST_CACHE,
)  # fmt: skip
CHANGES = (*TAKES_SPACE, "fsync", "replace", "rename", "unlink", "rmdir")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def is_direct(fd):
    """Whether writes to the file go past the page cache."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)


class Striker:
    """Counts calls that change the disk, and strikes one."""

    def __init__(self, request):
        self._request = request
        self._lock = threading.Lock()
        self.calls = []
        for name in CHANGES:
            if name != PAST_CACHE:
                setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, original):
        def call(*args, **kwargs):
            if name == "open" and not (args[1] if len(args) > 1 else 0) & WRITES:
                return original(*args, **kwargs)
            made = PAST_CACHE if name == "pwrite" and is_direct(args[0]) else name
            with self._lock:
                self.calls.append(made)
                self._strike(made, len(self.calls))
            return original(*args, **kwargs)

        return call

    def _strike(self, name, number):
        at = self._request.get("at")
        lasting = self._request.get("lasting") and name in TAKES_SPACE
        if at is None or not (number == at or (number > at and lasting)):
            return
        if self._request.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self._request["errno"], os.strerror(self._request["errno"]))


def run(request):
    striker = Striker(request)
    answer = {}
    try:
        if "data" in request["arguments"]:
            result = calibrate(**request["arguments"])
            answer = {"state": result.state, "resumed": result.resumed_layers}
        elif "target" in request["arguments"]:
            answer = {"state": prepare(**request["arguments"]).state}
        else:
            result = convert(**request["arguments"])
            answer = {"state": result.state, "resumed": result.resumed_shards}
    except BaseException as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        answer["exit_code"] = getattr(error, "exit_code", None)
    return {**answer, "calls": striker.calls}


def serve(request):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(run(request), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        if "after" in request:
            select.select([pipe], [], [], request["after"])
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text.endswith("}") else {"killed": True}


def warm_up(arguments):
    """Compile, or import, in this process what all forks need."""
    if "target" in arguments:
        return  # compiles nothing
    with tempfile.TemporaryDirectory() as folder:
        settings = {**arguments, "output": f"{folder}/out", "overwrite": False}
        if "data" in arguments:
            calibrate(**settings)
        else:
            convert(**{**settings, "workers": 1})


torch.set_num_threads(1)
warm = set()
for line in sys.stdin:
    request = json.loads(line)
    if (kind := request["arguments"].get("format")) not in warm:
        warm_up(request["arguments"])
        warm.add(kind)
    print(json.dumps(serve(request)), flush=True)
