"""Time the first call of a layer as wide as Qwen3-30B's, in each format.

    first_call.py --json OUT [--only NAME,...]

A layer is called twice for the first time, each in a process of its own: with empty caches, where
its kernels are compiled, and with what that left on the disk. Counted is the call, not the start of
Python, torch and CUDA. The exit code is 1 if a call takes longer than LIMITS_S.
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

CASES = {
    "fp8_block": ("fp8_block", "format", None),
    "fp8_channel": ("fp8_channel", "format", None),
    "cutlass_fp8": ("fp8_channel", "format", "cutlass_fp8"),
    "w4a8": ("w4a8", "format", None),
    "mxfp4": ("mxfp4", "format", None),
    "mxfp4_fp8": ("mxfp4", "fp8_token", None),
    "nvfp4": ("nvfp4", "format", None),
}
"""By name: the format, the activations and the backend, None for the default."""
LIMITS_S = {"empty": 20.0, "filled": 1.0}
"""By what the caches are."""
SHAPE, TOKENS = "qwen3-30b", 16
_CACHES = ("MOEQUANT_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def call_once(name):
    """Seconds of a first call in this process."""
    import torch

    from moequant.benchmarks.layers import random_experts, random_inputs
    from moequant.benchmarks.shapes import SHAPES
    from moequant.runtime import FusedExperts

    format, activations, backend = CASES[name]
    shape, device = SHAPES[SHAPE], torch.device("cuda")
    weights = random_experts(shape, format, device)
    inputs = random_inputs(shape, TOKENS, device, seed=0)
    experts = FusedExperts(weights, backend=backend, activations=activations)
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = experts(*inputs.arguments)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert out.isfinite().all()
    return seconds


def time_case(name):
    """Seconds of the first call with empty and with filled caches, by the names of the limits."""
    command = [sys.executable, __file__, "--one", name]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **{cache: str(Path(folder) / cache) for cache in _CACHES}}
        printed = [
            subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            for _ in LIMITS_S
        ]
    return dict(zip(LIMITS_S, map(float, printed), strict=True))


def too_long(found):
    """A line for each call that takes longer than it may."""
    return [
        f"{name}: the first call with {caches} caches takes {seconds:.2f} s; "
        f"at most {LIMITS_S[caches]:.0f} s are wanted"
        for name, times in found.items()
        for caches, seconds in times.items()
        if seconds > LIMITS_S[caches]
    ]


def parse(words):
    """What a command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(CASES), metavar="NAME,...")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.only = given.only.split(",")
    if unknown := [name for name in given.only if name not in CASES]:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    if given.one is None and given.json is None:
        parser.error("--json is missing")
    return given


def main(words):
    """See the head of this file."""
    given = parse(words)
    if given.one:
        print(call_once(given.one))
        return 0
    found = {}
    for name in given.only:
        found[name] = time_case(name)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
        print(name, {caches: round(seconds, 2) for caches, seconds in found[name].items()})
    lines = too_long(found)
    print(*lines, sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
