"""Time starts of `vllm serve` with the plug-in, and its first answers.

    first_start.py CHECKPOINT --json OUT [-- OPTIONS]

The first start finds no cache: neither vLLM's nor torch's nor our kernels. The second finds what
the first left, and so does the third, whose experts were prepared for this GPU. OPTIONS are those
of `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engines"))

from served_vllm import START_S, complete, parse, serve

_CACHES = (
    "MOEQUANT_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
_PREPARED = ["--additional-config", json.dumps({"moequant": {"prepared": "sm90"}})]
_LOG_END = 4000


def _answer_s(server, length):
    """Seconds until a prompt of this many tokens is answered; others begin differently."""
    ids = [3 + (7919 * i * i + 13 * length) % 1000 for i in range(length)]
    request = {"prompt": ids, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    began = time.perf_counter()
    complete(server, request)
    return time.perf_counter() - began


def time_start(checkpoint, options, log):
    """Seconds until the server answers, and of its answers; the log is printed if it fails."""
    began = time.perf_counter()
    try:
        with serve(
            checkpoint, log, alone=False, beside=False, options=options, start_s=START_S
        ) as server:
            found = {"ready_s": time.perf_counter() - began}
            for name, length in (("first", 700), ("cached", 700), ("another_length", 333)):
                found[f"{name}_answer_s"] = _answer_s(server, length)
            return found
    except (RuntimeError, OSError):
        print(log.read_text(errors="replace")[-_LOG_END:])
        raise


def command_line():
    """The parser of its own options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    return parser


def main():
    """See the head of this file."""
    given, found = parse(command_line(), sys.argv[1:]), {}
    prepare = [sys.executable, "-m", "moequant", "prepare", str(given.checkpoint)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: str(Path(folder) / name.lower()) for name in _CACHES})
        for name, more in (("first", []), ("second", []), ("prepared", _PREPARED)):
            if name == "prepared":
                subprocess.run([*prepare, "--target", "sm90", "--overwrite", "-q"], check=True)
            log = Path(folder) / f"{name}.log"
            found[name] = time_start(given.checkpoint, [*given.options, *more], log)
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    print({name: {key: round(s, 2) for key, s in times.items()} for name, times in found.items()})


if __name__ == "__main__":
    main()
