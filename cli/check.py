"""moequant check CHECKPOINT: which engines load it, on which GPUs, by which kernels; why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult
from moequant.cli.output import Output, count, origin_of, quantization, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.compatibility import CompatibilityReport, EngineReport
    from moequant.storage.checkpoint import Checkpoint

_LOADS = {True: "yes", False: "no", None: "not known"}
_RANKS_SHOWN = 3
_KNOWN = {"tested": "a test", "read": "its sources", "seen": "a try", None: ""}


@click.command(
    "check",
    short_help="Say which engines load a checkpoint, and why not.",
    epilog=options.examples(
        "moequant check qwen3-nvfp4",
        "moequant check Qwen/Qwen3-30B-A3B-FP8 --engine vllm,sglang --gpu h100 --tp 4",
    ),
)
@click.argument("checkpoint", type=options.DIRECTORY)
@options.checked_engines_option
@options.gpu_option
@options.ranks_option("--tp", help="Ranks of tensor parallelism.")
@options.ranks_option(
    "--ep",
    help="Ranks among which experts are divided: of vLLM, --enable-expert-parallel; of SGLang, "
    "--ep-size.",
)
@click.option(
    "--layers",
    metavar="N",
    callback=options.check_some_layers,
    help="Number of expert layers whose scales are read, or all.  [default: all of a directory, 3 "
    "of a hub repository]",
)
@options.architecture_option
@options.revision_option
@options.json_option
def command(
    checkpoint: str,
    engine: list[str] | None,
    gpu: str | None,
    tp: int,
    ep: int,
    layers: str | int | None,
    architecture: str | None,
    revision: str | None,
    as_json: bool,
) -> None:
    """Say which engines load CHECKPOINT: any, quantized by whatever tool, or not at all.

    CHECKPOINT is a directory or the id of a repository on the Hugging Face hub. Reads config.json,
    headers and scales, and no weights. The exit code is 4 if an engine of --engine does not load
    it, or has no room for its weights on --gpu, or if none does.
    """
    from moequant.compatibility import check_checkpoint
    from moequant.errors import UnsupportedError
    from moequant.storage.hub_folder import open_headers
    from moequant.weights.converted import described_architectures

    out = Output(as_json=as_json)
    opened = open_headers(checkpoint, revision)
    own = described_architectures(opened.path, architecture)
    wanted = len(opened.tensors) if layers == "all" else layers
    assert not isinstance(wanted, str)
    report = check_checkpoint(opened, own, engines=engine, gpu=gpu, tp=tp, ep=ep, layers=wanted)
    document = _describe(opened, report, gpu)
    refused = [one for one in report.engines if not _runs(one, gpu)]
    if not refused or (engine is None and len(refused) < len(report.engines)):
        out.result(document, _show)
        return
    if not as_json:
        out.result(document, _show)
    where = f" on {gpu}" if gpu else ""
    where += f" with tp {tp} and ep {ep}" if (tp, ep) != (1, 1) else ""
    lines = [f"  {_refusal(one)}" for one in refused]
    found = "no engine loads it" if engine is None else "not every engine asked for loads it"
    message = "\n".join([f"{checkpoint}: {found}{where}", *lines])
    raise FailedResult(UnsupportedError(message), document)


def _runs(engine: EngineReport, gpu: str | None) -> bool:
    """Whether an engine loads a checkpoint, and its weights may fit into the GPU asked for."""
    lacks_memory = gpu is not None and engine.memory is not None and engine.memory.fits is False
    return engine.loads is True and not lacks_memory


def _refusal(engine: EngineReport) -> str:
    """One line about an engine that does not load a checkpoint, or has no room for it."""
    verdict = engine.verdict
    title = f"{verdict.engine} {verdict.version}"
    if engine.loads is None:
        return f"{title}: not known, no rule is about this"
    if engine.loads:
        assert engine.memory is not None
        (gpu,) = engine.memory.gpus
        return (
            f"{title}: {_lack(engine.memory.weight_bytes, engine.memory.ranks, gpu.memory_bytes)}"
        )
    sentences = [said.text for said in engine.against]
    sentences += [text for gpu in engine.gpus for text in gpu.lacking]
    return sentences[0]


def _lack(weight_bytes: int, ranks: int, memory_bytes: int) -> str:
    return f"{_on_each(weight_bytes, ranks)} of {size(memory_bytes)} do not fit"


def _on_each(weight_bytes: int, ranks: int) -> str:
    gpus = "1 GPU" if ranks == 1 else f"each of {ranks} GPUs"
    return f"{size(weight_bytes)} of weights on {gpus}"


def _describe(
    checkpoint: Checkpoint, report: CompatibilityReport, gpu: str | None
) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        **origin_of(checkpoint),
        **report.to_json(),
        "gpu": gpu,
    }


def _show(out: Output, report: Mapping[str, Any]) -> None:
    place = report["repository"] or report["path"]
    layers, read = len(report["expert_layers"]), len(report["scales_read_in_layers"])
    dialect = None if report["dialect"] == "none" else report["dialect"]
    out.fields(
        {
            "checkpoint": place,
            "architecture": f"{report['architecture']}, {count(layers, 'layer')} with "
            f"{report['experts']} experts",
            "sizes": f"hidden {report['hidden']}, intermediate {report['intermediate']}",
            "quantization": quantization(dialect, report["formats"]),
            "scales": f"read in {read} of {count(layers, 'layer')}",
        }
    )
    out.line()
    out.table(
        ["engine", "loads it", "known from", "tp", "tp = ep"],
        [
            (
                f"{e['engine']} {e['version']}",
                _LOADS[e["loads"]],
                _KNOWN[e["known"]],
                _ranks(e["tp"]),
                _ranks(e["tp_with_ep"]),
            )
            for e in report["engines"]
        ],
    )
    for engine in report["engines"]:
        out.line()
        _show_engine(out, engine)
        _show_memory(out, engine, report)


def _ranks(ranks: Sequence[int]) -> str:
    """Powers of two as text, shortened where all up to the largest are among them."""
    if len(ranks) > _RANKS_SHOWN and ranks[-1] == 1 << (len(ranks) - 1):
        return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    return ", ".join(map(str, ranks)) or "-"


def _show_engine(out: Output, engine: Mapping[str, Any]) -> None:
    out.line(f"{engine['engine']} {engine['version']}")
    ways = _by_way(engine["gpus"])
    for way, names in ways.items():
        if len(ways) > 1 or way:
            where = ", ".join(names) if len(ways) > 1 or len(names) == 1 else "every GPU"
            out.folded(f"{where}: {way or 'no'}", indent=2)
    starts = engine["started_with"]
    for start in starts:
        if start["options"]:
            where = f" on {', '.join(start['gpus'])}" if len(starts) > 1 else ""
            out.folded(f"start it{where} with {' '.join(start['options'])}", indent=2)
    for kind, entries in (("why not", engine["why"]), ("note", engine["cautions"])):
        for said in entries:
            text = f"{kind} [{said['rule']}]: {said['text']} {said['next']}"
            out.folded(text.strip(), indent=2)


def _show_memory(out: Output, engine: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """The weights of a rank; of a GPU that was asked for, what they leave, or from where on."""
    memory, gpu = engine["memory"], report["gpu"]
    if memory is None:
        if gpu in engine["fits_from"] and (engine["tp"] or engine["tp_with_ep"]):
            place = f"with tp {report['tp']} and ep {report['ep']} it does not load"
            least = _least(engine["fits_from"][gpu], "the weights")
            out.folded(f"memory: {place}{least}", indent=2)
        return
    if gpu is None:
        text = _on_each(memory["weight_bytes"], memory["ranks"])
    else:
        (found,) = memory["gpus"]
        text = _fit(found, memory)
        text += "" if found["fits"] else _least(engine["fits_from"][gpu], "they")
    kv = memory["kv"]
    text += "; KV cache: " + ("not known" if kv is None else f"{size(kv['token_bytes'])} a token")
    out.folded(f"memory: {text}", indent=2)


def _fit(gpu: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    weights, ranks = memory["weight_bytes"], memory["ranks"]
    if gpu["fits"] is False:
        return _lack(weights, ranks, gpu["memory_bytes"])
    text = f"{_on_each(weights, ranks)} of {size(gpu['memory_bytes'])}"
    if gpu["fits"] is None:
        return f"{text} hardly fit"
    text += f"; {size(gpu['left_bytes'])} left for KV cache, activations and the engine"
    return text if gpu["tokens"] is None else f"{text}, at most {gpu['tokens']:,} tokens"


def _least(fits_from: Mapping[str, int | None], weights: str) -> str:
    """The numbers of ranks from which on the weights fit."""
    from moequant.compatibility import least_ranks

    found = least_ranks(fits_from)
    return f"; {weights} fit from {found} on" if found else f"; {weights} fit at no number of ranks"


def _by_way(gpus: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The GPUs that run a checkpoint in one way, by the way; empty where they do not."""
    ways: dict[str, list[str]] = {}
    for gpu in gpus:
        ways.setdefault(_way(gpu), []).extend(gpu["names"])
    return ways


def _way(gpu: Mapping[str, Any]) -> str:
    if gpu["loads"] is False:
        return "no kernel" if gpu["lacking"] and not gpu["why"] else ""
    if not gpu["kernels"]:
        return "kernels not known" if gpu["loads"] is None else "as the unquantized model"
    found = [f"{format} by {kernel}" for format, kernel in gpu["kernels"].items()]
    return "; ".join(found) if len(found) > 1 else next(iter(gpu["kernels"].values()))
