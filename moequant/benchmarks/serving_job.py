"""A job of `moequant bench serve`, in a process of its own.

    python -m moequant.benchmarks.serving_job machine REQUEST.json RESULT.json
    python -m moequant.benchmarks.serving_job model   REQUEST.json RESULT.json
    python -m moequant.benchmarks.serving_job engine  REQUEST.json RESULT.json

`machine` describes the device and measures its bandwidth, `model` writes a model of random weights,
`engine` times an engine. RESULT.json is what they found, or `error`, in one line.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moequant.benchmarks.device_profile import NOTHING, profile_of_step
from moequant.benchmarks.random_models import random_model
from moequant.benchmarks.serving_engines import ENGINES
from moequant.benchmarks.serving_setup import (
    FIRST_TOKENS,
    PREFILL_PROMPTS,
    PROMPT_TOKENS,
    Setup,
    decoded_length,
)
from moequant.errors import MoequantError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moequant.benchmarks.device_profile import DeviceProfile
    from moequant.benchmarks.serving_engines import Engine

_PROFILED_STEPS = 16
_PROFILES_OF_SEVERAL_GPUS = 3
"""Of each call; of one GPU, one profile."""
_CPU_READ_BYTES = 1 << 28
_CPU_READS = 5
_IDS = range(3, 30000)
"""From which prompts are drawn, as far as the vocabulary goes."""


def time_engine(request: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine and time it.

    Args:
        request: `engine`, `setup` (the fields of Setup), `rounds`, `vocabulary` and `profile`,
            whether to do that, too.

    Returns:
        `version`, `experts`, `start_s`, `decode_s` (seconds of a step, by batch), `prefill_s`, and
        `profile`: of a step by batch and of the "prefill", as `profile_of_step` says; else empty.

    Raises:
        UnsupportedError: the engine is not installed, or cannot run as `setup` asks.
        MoequantError: more tokens did not take longer, or the device has too little memory free.
    """
    setup = Setup(**request["setup"])
    started = time.perf_counter()
    engine = ENGINES[request["engine"]](setup)
    start_s = time.perf_counter() - started
    prompts = _RandomPrompts(request["vocabulary"])
    rounds = request["rounds"]
    decode_s = {
        str(batch): _step_s(engine, prompts, batch, steps=setup.steps, rounds=rounds)
        for batch in setup.batches
    }
    prefill_s = _prefill_s(engine, prompts, setup.prefill_length, rounds)
    profile = _profile(engine, prompts, setup) if request["profile"] else {}
    return {
        "version": engine.version,
        "experts": engine.experts,
        "start_s": start_s,
        "decode_s": decode_s,
        "prefill_s": prefill_s,
        "profile": profile,
    }


def _profile(engine: Engine, prompts: _RandomPrompts, setup: Setup) -> dict[str, Any]:
    """Profiles of a step of each batch and of the prefill, of calls no longer than those timed.

    One of several GPUs is busy, too, while it waits for the others in a collective operation; there
    the call counts in which it is busy for the least time.
    """
    steps = min(setup.steps, _PROFILED_STEPS)
    count = _PROFILES_OF_SEVERAL_GPUS if setup.tensor_parallel > 1 else 1

    def profiled(batch: int, length: int, new_tokens: int) -> DeviceProfile:
        calls = [prompts.draw(batch, length) for _ in range(count)]
        profiles = [engine.profile(call, new_tokens) for call in calls]
        return min(profiles, key=lambda profile: profile.busy_us)

    prefill = profiled(PREFILL_PROMPTS, setup.prefill_length, 1)
    found = {"prefill": profile_of_step(NOTHING, prefill, 1)}
    for batch in setup.batches:
        engine.prepare(batch, decoded_length(steps))
        # The first call in a new cache compiles and captures.
        engine.generate(prompts.draw(batch, PROMPT_TOKENS), FIRST_TOKENS)
        new_tokens = (FIRST_TOKENS, FIRST_TOKENS + steps)
        few, many = (profiled(batch, PROMPT_TOKENS, new) for new in new_tokens)
        found[str(batch)] = profile_of_step(few, many, steps)
    return found


def _step_s(
    engine: Engine, prompts: _RandomPrompts, batch: int, *, steps: int, rounds: int
) -> float:
    """Seconds of a decoding step: what `steps` more tokens take, by the least of `rounds` each.

    Calls of fewer and of more tokens take turns: a machine that is busy for a while slows both.
    """
    engine.prepare(batch, decoded_length(steps))
    times: dict[int, list[float]] = {FIRST_TOKENS: [], FIRST_TOKENS + steps: []}
    for _ in range(1 + rounds):
        for new_tokens, found in times.items():
            ids = prompts.draw(batch, PROMPT_TOKENS)
            found.append(_seconds(partial(engine.generate, ids, new_tokens)))
    # Without the first, which compile and capture.
    short, long = (min(found[1:]) for found in times.values())
    if long <= short:
        raise MoequantError(
            f"at batch {batch}, {steps} more tokens took {long - short:.4f} s; raise --steps or "
            "--rounds"
        )
    return (long - short) / steps


def _prefill_s(engine: Engine, prompts: _RandomPrompts, length: int, rounds: int) -> float:
    """Seconds of a prefill of prompts of `length` tokens: the least of `rounds` calls.

    One call before them compiles and captures.
    """
    engine.prepare(PREFILL_PROMPTS, length + 1)
    drawn = [prompts.draw(PREFILL_PROMPTS, length) for _ in range(1 + rounds)]
    _, *times = [_seconds(partial(engine.generate, ids, 1)) for ids in drawn]
    return min(times)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class _RandomPrompts:
    """Random prompts, the same in every engine."""

    def __init__(self, vocabulary: int) -> None:
        self._random = random.Random(0)  # noqa: S311 - not for secrets
        self._ids = range(_IDS.start, min(_IDS.stop, vocabulary))

    def draw(self, batch: int, length: int) -> list[list[int]]:
        """`batch` prompts of `length` tokens."""
        return [self._random.choices(self._ids, k=length) for _ in range(batch)]


def describe(request: Mapping[str, Any]) -> dict[str, Any]:
    """The `machine`, and `read_tb_per_s` of its memory; `device` is of the request."""
    if request["device"] == "cuda":
        from moequant.benchmarks.cuda_timing import measure_read_tb_per_s
        from moequant.benchmarks.machine import cuda_device, describe_machine

        place = cuda_device("cuda")
        with torch.cuda.device(place):
            rate = measure_read_tb_per_s(place)
        return {"machine": describe_machine(place), "read_tb_per_s": rate}
    from moequant.benchmarks.machine import describe_cpu

    x = torch.zeros(_CPU_READ_BYTES // 4)
    seconds = min(_seconds(x.sum) for _ in range(_CPU_READS))
    return {"machine": describe_cpu(), "read_tb_per_s": x.nbytes / seconds / 1e12}


def write_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model of random weights: `shape`, `layers`, `vocabulary`, `folder`, `device`."""
    model = random_model(request["shape"]).resized(request["layers"], request["vocabulary"])
    model.write(Path(request["folder"]), torch.device(request["device"]))
    return {}


JOBS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "machine": describe,
    "model": write_model,
    "engine": time_engine,
}


def main(job: str, request: Path, result: Path) -> None:
    """Run a job, and write what it found."""
    try:
        found = JOBS[job](json.loads(request.read_text()))
    # An engine may raise anything: it is named with its reason, and the others go on.
    except Exception as error:
        traceback.print_exc()
        text = (str(error).strip() or repr(error)).splitlines()[0]
        name = "" if isinstance(error, MoequantError) else f"{type(error).__name__}: "
        found = {"error": name + text, "unsupported": isinstance(error, UnsupportedError)}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:4]))
