"""Time whole models in vLLM, vLLM with the plug-in, transformers, and moequant, beside a floor.

Each engine runs in a process of its own, one after the other. A step of decoding is what more new
tokens take, divided by their number, so that neither prefill nor sampling of the first token is
part of it. The floor of a step is the time to read its weights and KV cache (`step_floor`) at the
bandwidth that the device is measured to have in the same run. The result is a JSON document:

    measured, method, machine, read_tb_per_s
    batches, prefill_tokens, steps, activations, tensor_parallel, expert_parallel
    attention_backend   of vLLM; null for its choice
    checkpoints   for each: name, floor_ms (by batch), and
      engines       for each: engine, and either `error`, the reason, with `log`, the end of what it
                    printed, or
        version, experts (what computes them), start_s
        decode      for each batch: batch, ms_per_step, tokens_per_s, and share_of_floor, of which
                    1 is the limit, but for what stays in the L2 cache
        prefill     ms, tokens_per_s
        profile     if asked for: of a step by batch, and of "prefill": busy_ms, in which the GPU,
                    of several the first, does anything, and kernels, those with the most time:
                    name, ms, launches
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moequant.benchmarks.random_models import random_model
from moequant.benchmarks.serving_engines import ENGINES
from moequant.benchmarks.serving_process import LOG_END, run_job, run_or_raise
from moequant.benchmarks.serving_setup import (
    FIRST_TOKENS,
    PREFILL_PROMPTS,
    PROMPT_TOKENS,
    Setup,
    mean_context,
)
from moequant.benchmarks.shapes import model_name
from moequant.benchmarks.step_floor import StepFloor
from moequant.benchmarks.vllm_log import add_cause, find_experts
from moequant.conversion import convert
from moequant.errors import ArgumentError, unknown_name
from moequant.integrations.tokenizer import vocabulary_size
from moequant.integrations.vllm.name import NAME as PLUG_IN
from moequant.progress import SilentProgress
from moequant.runtime.activations import FP8_TENSOR
from moequant.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice

METHOD = (
    f"Least times of each call. Decoding: prompts of {PROMPT_TOKENS} random tokens; the time of "
    f"{FIRST_TOKENS} new tokens subtracted from that of more, divided by the difference. Prefill: "
    f"{PREFILL_PROMPTS} prompts and one new token each. Every engine in a process of its own."
)
PLAIN = "bf16"
"""The name of a random model that is not converted."""


@dataclass(frozen=True, kw_only=True)
class ServingMeasure:
    """What to measure.

    Attributes:
        engines: names in ENGINES.
        batches: sequences at once, at least 1.
        prefill_tokens: tokens of all prompts of a prefill, a multiple of 8.
        steps: decoding steps that are timed.
        rounds: times each call is timed.
        device: "cuda" or "cpu".
        activations: of our experts, in vLLM and alone; see `FusedExperts`.
        attention_backend: vLLM's name of one; None for vLLM's choice.
        tensor_parallel: number of GPUs of vLLM.
        expert_parallel: whether these divide experts.
        profile: whether torch's profiler looks at a step after all is timed.
        timeout_s: seconds after which an engine is given up.
    """

    engines: Sequence[str]
    batches: Sequence[int]
    prefill_tokens: int
    steps: int
    rounds: int
    device: str
    activations: ActivationsChoice
    attention_backend: str | None
    tensor_parallel: int
    expert_parallel: bool
    profile: bool
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class RandomSource:
    """A model of random weights: its name, layers, vocabulary (None: its own), and formats."""

    shape: str
    layers: int
    vocabulary: int | None
    formats: Sequence[str]


def bench_serving(
    checkpoints: Sequence[Path],
    random_source: RandomSource | None,
    measure: ServingMeasure,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Time every engine with every checkpoint.

    Args:
        checkpoints: folders.
        random_source: a model to generate, to convert, and to time in each of its formats.
        measure: what to measure.
        folder: where to generate; by default the folder for temporary files.
        progress: receives every engine.
        keep: receives the document after every engine, with what was timed until then.

    Returns:
        The document; see the module. Engines that failed are in it, with the reason.

    Raises:
        CheckpointError: not a checkpoint.
        ArgumentError: an unknown engine or model, nothing to time, or settings that do not go
            together.
        UnsupportedError: no such device here.
        MoequantError: a model could not be written or converted.
    """
    _check(checkpoints, random_source, measure)
    report = progress or SilentProgress()
    with tempfile.TemporaryDirectory(prefix="moequant-bench-", dir=folder) as name:
        place = Path(name)
        found = run_or_raise(
            "machine", {"device": measure.device}, place, timeout_s=measure.timeout_s
        )
        rows: list[dict[str, Any]] = []
        document = {
            "measured": datetime.now(UTC).date().isoformat(),
            "method": METHOD,
            **found,
            "batches": list(measure.batches),
            "prefill_tokens": measure.prefill_tokens,
            "steps": measure.steps,
            "activations": measure.activations,
            "tensor_parallel": measure.tensor_parallel,
            "expert_parallel": measure.expert_parallel,
            "attention_backend": measure.attention_backend,
            "checkpoints": rows,
        }
        formats = random_source.formats if random_source is not None else ()
        count = (len(checkpoints) + len(formats)) * len(measure.engines)
        report.start("timing", count, unit="engines")
        for label, path in _checkpoints(checkpoints, random_source, place, measure):
            floor_s = _floor_s(path, measure, found["read_tb_per_s"])
            floor_ms = {str(batch): seconds * 1e3 for batch, seconds in floor_s.items()}
            engines: list[dict[str, Any]] = []
            rows.append({"name": label, "floor_ms": floor_ms, "engines": engines})
            for engine in measure.engines:
                timed = _time(engine, path, place, measure)
                engines.append({"engine": engine, **_figures(timed, floor_s, measure)})
                report.advance(1, f"{engine}, {label}")
                if keep is not None:
                    keep(document)
        report.finish()
    return document


def failures(document: Mapping[str, Any]) -> list[str]:
    """What was not measured: engine and checkpoint."""
    return [
        f"{engine['engine']} with {row['name']}"
        for row in document["checkpoints"]
        for engine in row["engines"]
        if "error" in engine
    ]


def _check(
    checkpoints: Sequence[Path], random_source: RandomSource | None, measure: ServingMeasure
) -> None:
    if not checkpoints and random_source is None:
        raise ArgumentError(
            "there is nothing to time; give a folder with a checkpoint, or --shape NAME for random "
            "weights"
        )
    _check_engines(measure)
    if measure.device not in ("cuda", "cpu"):
        raise ArgumentError(f"device {measure.device!r}, but engines are timed on cuda or cpu")
    if measure.prefill_tokens < PREFILL_PROMPTS or measure.prefill_tokens % PREFILL_PROMPTS:
        raise ArgumentError(
            f"a prefill of {measure.prefill_tokens} tokens does not divide into {PREFILL_PROMPTS} "
            f"prompts; choose a multiple of {PREFILL_PROMPTS}"
        )
    if measure.profile and measure.device != "cuda":
        raise ArgumentError(
            f"a profile is of a GPU, but engines are to be timed on {measure.device}; leave out "
            "--profile, or choose --device cuda"
        )
    for path in checkpoints:
        Checkpoint.open(path)
    if random_source is not None:
        random_model(random_source.shape).resized(random_source.layers, random_source.vocabulary)


def _check_engines(measure: ServingMeasure) -> None:
    for name in measure.engines:
        if name not in ENGINES:
            raise ArgumentError(unknown_name("engine", name, ENGINES))
        if measure.activations == FP8_TENSOR and ENGINES[name].uses_plug_in:
            raise ArgumentError(
                f"activations {FP8_TENSOR} are not served by {name}, which pads steps for CUDA "
                "graphs; choose others, such as fp8_token, or other engines"
            )


def _checkpoints(
    checkpoints: Sequence[Path],
    random_source: RandomSource | None,
    place: Path,
    measure: ServingMeasure,
) -> Iterator[tuple[str, Path]]:
    """Names and folders, each made when it is asked for."""
    for path in checkpoints:
        yield path.name or str(path), path
    if random_source is None:
        return
    request = {
        "shape": random_source.shape,
        "layers": random_source.layers,
        "vocabulary": random_source.vocabulary,
        "folder": str(place / "source"),
        "device": measure.device,
    }
    run_or_raise("model", request, place, timeout_s=measure.timeout_s)
    layers = random_source.layers
    model = f"{model_name(random_source.shape)}, {layers} layer{'' if layers == 1 else 's'}"
    for format in random_source.formats:
        path = place / "source"
        if format != PLAIN:
            path = convert(path, place / "converted", format=format, overwrite=True).output
        yield f"{model}, {format}", path


def _floor_s(path: Path, measure: ServingMeasure, rate: float) -> dict[int, float]:
    """Seconds of the floor of a step at `rate` TB/s, by batch."""
    floor, context = StepFloor(path), mean_context(measure.steps)
    return {
        batch: floor.step(batch, context).total / rate / 1e12 / measure.tensor_parallel
        for batch in measure.batches
    }


def _time(engine: str, path: Path, place: Path, measure: ServingMeasure) -> dict[str, Any]:
    """What an engine took, or its `error`."""
    setup = Setup(
        checkpoint=str(path.resolve()),
        device=measure.device,
        activations=measure.activations,
        batches=tuple(measure.batches),
        steps=measure.steps,
        prefill_tokens=measure.prefill_tokens,
        attention_backend=measure.attention_backend,
        tensor_parallel=measure.tensor_parallel,
        expert_parallel=measure.expert_parallel,
    )
    request = {
        "engine": engine,
        "setup": asdict(setup),
        "rounds": measure.rounds,
        "vocabulary": vocabulary_size(Checkpoint.open(path).config, path),
        "profile": measure.profile,
    }
    plug_in = ENGINES[engine].uses_plug_in
    found, log = run_job(
        "engine",
        request,
        place,
        what=engine,
        timeout_s=measure.timeout_s,
        # Its entry point has the same name.
        plugins=PLUG_IN if plug_in else "",
    )
    if "error" in found:
        return {"error": add_cause(found["error"], log), "log": log[-LOG_END:]}
    logged = find_experts(log, plug_in=plug_in)
    if plug_in and logged is None:
        error = "vLLM did not say that moequant runs its experts: the plug-in was not used"
        return {"error": error, "log": log[-LOG_END:]}
    if found["experts"] is None:
        found["experts"] = logged
    return found


def _figures(
    found: Mapping[str, Any], floor_s: Mapping[int, float], measure: ServingMeasure
) -> dict[str, Any]:
    if "error" in found:
        return dict(found)
    return {
        "version": found["version"],
        "experts": found["experts"],
        "start_s": found["start_s"],
        "decode": [
            {
                "batch": batch,
                "ms_per_step": step_s * 1e3,
                "tokens_per_s": batch / step_s,
                "share_of_floor": floor_s[batch] / step_s,
            }
            for batch, step_s in ((b, found["decode_s"][str(b)]) for b in measure.batches)
        ],
        "prefill": {
            "ms": found["prefill_s"] * 1e3,
            "tokens_per_s": measure.prefill_tokens / found["prefill_s"],
        },
        **({"profile": found["profile"]} if measure.profile else {}),
    }
