"""moequant convert SOURCE OUTPUT --format NAME | --recipe NAME-OR-FILE."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult, InterruptedWork
from moequant.cli.measured_rates import duration, expected_seconds, remember_rate
from moequant.cli.output import (
    Output,
    count,
    show_requantization_errors,
    size,
    warnings_of_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from moequant.compatibility import Verdict
    from moequant.conversion import ConversionResult, Plan
    from moequant.storage.hub_folder import Download


@click.command(
    "convert",
    short_help="Convert a checkpoint's experts into a format.",
    epilog=options.examples(
        "moequant convert Qwen/Qwen3-30B-A3B qwen3-nvfp4 --format nvfp4 --dry-run",
        "moequant convert Qwen/Qwen3-30B-A3B qwen3-nvfp4 --format nvfp4",
        "moequant convert source out --format nvfp4 --option search=mse --for vllm",
        "moequant convert deepseek-ai/DeepSeek-V3 out --recipe deepseek-v3-nvfp4-experts",
    ),
)
@click.argument("source", type=options.DIRECTORY)
@click.argument("output", type=options.DIRECTORY)
@options.format_option
@options.format_options_option
@options.recipe_option
@options.dialect_option
@options.for_engine_option
@options.architecture_option
@options.statistics_option
@options.activation_scales_option
@options.keep_sensitive_option
@options.revision_option
@options.workers_option
@options.max_shard_size_option
@click.option("--dry-run", is_flag=True, help="Print the plan; read only headers, write nothing.")
@options.overwrite_option
@click.option(
    "--hash-source",
    is_flag=True,
    help="Record the SHA-256 of every weight file of SOURCE, which reads each file twice.",
)
@click.option(
    "--executor",
    default="local",
    metavar="WHERE",
    help="Where shards are written: local, or ray or ray:ADDRESS for a cluster.  [default: local]",
)
@click.option(
    "--delete-source-shards",
    is_flag=True,
    help="Fetch the shards of a hub repository one after the other into OUTPUT's work folder and "
    "delete each when it is converted: at most four are on the disk at once.",
)
@click.option(
    "--device",
    default="cpu",
    metavar="DEVICE",
    help="Where rounding=gptq computes: cpu, cuda or cuda:1. All else is as fast on the CPU."
    "  [default: cpu]",
)
@options.json_option
@options.quiet_option
def command(
    source: str,
    output: str,
    format: str | None,
    format_options: dict[str, str] | None,
    recipe: str | None,
    workers: int | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Convert the experts of SOURCE and write the result to OUTPUT.

    SOURCE is a directory or the id of a repository on the Hugging Face hub. Give either --format or
    --recipe. Run the same command again to continue an interrupted conversion.
    """
    options.check_one_given({"--format": format, "--recipe": recipe})
    from moequant.conversion import DEFAULT_WORKERS, convert

    out = Output(as_json=as_json, quiet=quiet)
    workers = workers or DEFAULT_WORKERS
    started = time.monotonic()
    try:
        with out.progress() as progress:
            result = convert(
                source,
                output,
                format=format,
                options=format_options,
                recipe=recipe,
                workers=workers,
                dry_run=dry_run,
                progress=progress,
                # Before the work starts; of what cannot be converted, the refusal is enough.
                on_plan=lambda plan: out.warn(*(() if plan.refusals else plan.warnings)),
                **settings,
            )
    except KeyboardInterrupt:
        raise InterruptedWork from None
    seconds = time.monotonic() - started
    if result.state == "converted" and not result.resumed_shards:
        kind = _kind("hub" if result.fetched_bytes else "disk", result.plan)
        remember_rate(kind, result.plan.source_bytes, seconds)
    document = _describe(result, workers, seconds)
    document["delete_source_shards"] = settings["delete_source_shards"]
    out.warn(*_warnings_of(result))
    if result.error is not None:
        # A refused plan has no output sizes to show.
        if not result.plan.refusals and not as_json:
            out.result(document, _show_plan)
        raise FailedResult(result.error, document)
    document["next"] = _next_command(
        source,
        output,
        revision=settings["revision"],
        statistics=None if result.plan.statistics is None else settings["statistics"],
        activation_scales=None
        if result.plan.input_scales is None
        else str(result.plan.input_scales.path),
    )
    out.result(document, _show_plan if dry_run else _show_result)


def _next_command(source: str, output: str, **given: str | None) -> str:
    command = ["moequant", "verify", output, "--against", source]
    for option, value in given.items():
        command += [] if value is None else [f"--{option.replace('_', '-')}", value]
    return shlex.join(command)


def _describe(result: ConversionResult, workers: int, seconds: float) -> dict[str, Any]:
    from moequant.storage.process_memory import peak_resident_bytes

    plan, choice = result.plan, result.quantizer
    return {
        "state": result.state,
        "output": str(result.output),
        "architecture": plan.model.architecture.name,
        "dialect": plan.dialect.name,
        "engines": [_describe_verdict(verdict) for verdict in plan.engines],
        "expert_layers": list(plan.model.layers),
        "experts": plan.model.moe.experts,
        "statistics": _statistics(plan),
        "activation_scales": _activation_scales(plan),
        "kept_layers": [asdict(one) for one in result.kept],
        "groups": _groups(plan),
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "expected_seconds": _expected(result) if result.state == "planned" else None,
        "free_bytes": result.free_bytes,
        "download": _download(result.download),
        "shards": len(plan.shards),
        "resumed_shards": result.resumed_shards,
        "workers": workers,
        "peak_bytes": plan.peak_bytes(workers),
        # None if nothing was converted, or by other machines.
        "resident_bytes": peak_resident_bytes() if choice and result.state == "converted" else None,
        "seconds": round(seconds, 3),
        "requantization_errors": [error.to_json() for error in result.requantization_errors],
        "gptq_errors": [error.to_json() for error in result.gptq_errors],
        "not_finite": list(result.not_finite),
        # None if this machine quantized nothing.
        "quantizer": choice
        and {
            "name": choice.quantizer.name,
            "summary": choice.quantizer.summary,
            "reason": choice.reason,
        },
        "quantizers": [asdict(share) for share in result.shares],
        "warnings": [*plan.warnings, *_warnings_of(result)],
        "refusals": list(result.refusals),
    }


def _describe_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "engine": verdict.engine,
        "version": verdict.version,
        "loads": verdict.loads,
        "known": verdict.known,
        "why": list(verdict.why),
        "cautions": list(verdict.cautions),
        "rules": [said.rule for said in (*verdict.against, *verdict.remarks)],
    }


def _kind(place: str, plan: Plan) -> str:
    """What a rate is of: the place that the source comes from, and the formats."""
    return f"{place} {'+'.join(sorted({unit.format for unit in plan.units}))}"


def _expected(result: ConversionResult) -> float | None:
    """The time of a planned conversion by the rates of earlier ones; None if they are not known."""
    left = 0 if result.download is None else result.download.left_bytes
    here = max(0, result.plan.source_bytes - left)
    return expected_seconds({_kind("hub", result.plan): left, _kind("disk", result.plan): here})


def _download(download: Download | None) -> dict[str, Any] | None:
    """What a source on the hub takes to download; None for a directory."""
    if download is None:
        return None
    return {
        "repository": download.repository.repo_id,
        "commit": download.repository.commit,
        "bytes": download.size_bytes,
        "cached_bytes": download.cached_bytes,
        "cache": str(download.cache),
        "free_bytes": download.free_bytes,
    }


def _statistics(plan: Plan) -> dict[str, Any] | None:
    """Which statistics are used, and for how many weights; None without any."""
    from moequant.conversion import weight_counts

    if plan.statistics is None:
        return None
    weighted, unweighted = weight_counts(plan.units)
    return {
        "path": str(plan.statistics.path),
        "sha256": plan.statistics.digest,
        "tokens": plan.statistics.record.data.tokens,
        "weighted": weighted,
        "unweighted": unweighted,
    }


def _activation_scales(plan: Plan) -> dict[str, Any] | None:
    """How many weights have a static scale of their input, by where it is from; None without."""
    static = [unit for unit in plan.units if unit.activation_scales is not None]
    if not static:
        return None
    measured = [unit for unit in static if isinstance(unit.activation_scales, str)]
    return {
        "path": None if plan.input_scales is None else str(plan.input_scales.path),
        "weights": sum(len(unit.weights) for unit in static),
        "from_statistics": sum(len(unit.weights) for unit in measured),
    }


_SLOW = "which writes the same bytes as the native quantizer, but several times slower"


def _warnings_of(result: ConversionResult) -> Iterator[str]:
    """What the conversion itself found, besides the warnings of the plan."""
    yield from warnings_of_numbers(result.not_finite)
    yield from _slowness(result)


def _slowness(result: ConversionResult) -> Iterator[str]:
    """A warning for each quantizer in use that is not the fastest, with the reason."""
    for share in result.shares:
        if share.reason is not None:
            part = f"{len(share.shards)} of {count(len(result.plan.shards), 'shard')} "
            by = _by(share.name, share.hosts)
            yield f"{part}quantized by {by}, {_SLOW}: {share.reason}"
    choice = result.quantizer
    if result.state == "planned" and choice is not None and choice.reason is not None:
        yield f"quantized by {choice.quantizer.name}, {_SLOW}: {choice.reason}"


def _by(name: str, places: Iterable[str]) -> str:
    where = ", ".join(places)
    return f"{name} on {where}" if where else name


def _groups(plan: Plan) -> list[dict[str, Any]]:
    """Counts and bytes by role and format; a format of None is kept as it was.

    What is refused has no form on disk: its bytes there are 0.
    """
    from moequant.weights.encoded import EncodedInfo

    sizes: dict[tuple[str, str | None], list[tuple[int, int]]] = defaultdict(list)
    for unit in (*plan.units, *plan.dequantized):
        for weight in unit.weights:
            written = 0
            if not plan.refusals:
                specs = plan.dialect.specs(
                    weight.module, unit.format, weight.info.shape, static=unit.is_static
                )
                written = sum(spec.size_bytes for spec in specs.values())
            sizes[weight.role, unit.format].append((weight.info.size_bytes, written))
    # Of what stays quantized, by the name of each of its tensors.
    roles = {
        part.name: plan.model.roles[info.name].role
        for info in plan.source.weights.values()
        if isinstance(info, EncodedInfo)
        for part in info.parts
    }
    for copy in plan.copies:
        role = roles.get(copy.name) or plan.model.architecture.classify(copy.name).role
        sizes[role, None].append((copy.info.size_bytes, copy.info.size_bytes))
    return [
        {
            "role": role,
            "format": format,
            "tensors": len(pairs),
            "source_bytes": sum(before for before, _ in pairs),
            "output_bytes": sum(after for _, after in pairs),
        }
        for (role, format), pairs in sizes.items()
    ]


def _show_plan(out: Output, plan: Mapping[str, Any]) -> None:
    out.table(
        ["role", "format", ">tensors", ">before", ">after"],
        [
            (
                group["role"],
                group["format"] or "kept",
                group["tensors"],
                size(group["source_bytes"]),
                size(group["output_bytes"]),
            )
            for group in plan["groups"]
        ],
    )
    out.line()
    quantizer = plan["quantizer"]
    out.fields(
        {
            "size": f"{size(plan['source_bytes'])} -> {size(plan['output_bytes'])}",
            **_disk_rows(plan),
            **_time_row(plan["expected_seconds"]),
            "shards": plan["shards"],
            "dialect": plan["dialect"],
            **_statistics_row(plan["statistics"]),
            **_activation_scales_row(plan["activation_scales"]),
            "quantizer": f"{quantizer['name']}, {quantizer['summary']}"
            if quantizer
            else "chosen by each worker of the cluster",
            "peak memory": f"{size(plan['peak_bytes'])} with {count(plan['workers'], 'worker')}, "
            "besides torch and moequant",
        }
    )
    _show_kept_layers(out, plan["kept_layers"])
    if plan["engines"]:
        loads = {**_LOADS, False: "no, see the warning"}
        known = {"tested": "a test", "read": "its sources", "seen": "a try", None: ""}
        out.line()
        out.table(
            ["engine", "loads it", "known from"],
            [
                (f"{e['engine']} {e['version']}", loads[e["loads"]], known[e["known"]])
                for e in plan["engines"]
            ],
        )


def _time_row(seconds: float | None) -> dict[str, str]:
    if seconds is None:
        return {}
    return {"time": f"about {duration(seconds)}, by the rates of earlier conversions here"}


def _disk_rows(plan: Mapping[str, Any]) -> dict[str, str]:
    """What is to be downloaded, and the free space of the disks that are written to."""
    rows = {"free space": f"{size(plan['free_bytes'])} on the disk of {plan['output']}"}
    download = plan["download"]
    if download is None:
        return rows
    left, cached = download["bytes"] - download["cached_bytes"], download["cached_bytes"]
    where = (
        "shards into the work folder of the output, at most four at once"
        if plan["delete_source_shards"]
        else f"to where {size(download['free_bytes'])} are free"
    )
    return {
        "source": f"{download['repository']} at {download['commit']}",
        "download": f"{size(left)}, {where}; {size(cached)} are in the cache, {download['cache']}",
        **rows,
    }


def _show_kept_layers(out: Output, kept: Iterable[Mapping[str, Any]]) -> None:
    rows = [(one["layer"], f"{one['cost']:.3%}", size(one["extra_bytes"])) for one in kept]
    if rows:
        out.line()
        out.table([">kept layer", ">cost if quantized", ">adds"], rows)


def _statistics_row(statistics: Mapping[str, Any] | None) -> dict[str, str]:
    if statistics is None:
        return {}
    return {
        "statistics": f"{count(statistics['tokens'], 'token')}, "
        f"sha256 {statistics['sha256'][:16]}: used for {count(statistics['weighted'], 'weight')}, "
        f"not for {statistics['unweighted']}"
    }


def _activation_scales_row(scales: Mapping[str, Any] | None) -> dict[str, str]:
    if scales is None:
        return {}
    return {
        "activation scales": f"{count(scales['weights'], 'weight')}, "
        f"{scales['from_statistics']} of them from the statistics"
    }


_LOADS = {True: "yes", False: "no", None: "not known"}


def _show_result(out: Output, result: Mapping[str, Any]) -> None:
    if result["state"] == "already converted":
        out.line(f"{result['output']}: already converted, nothing to do")
    else:
        line = (
            f"{result['output']}: {size(result['source_bytes'])} -> {size(result['output_bytes'])} "
            f"in {count(result['shards'], 'shard')}, {result['seconds']:.1f} s"
        )
        if result["resumed_shards"]:
            out.line(f"{line}; {result['resumed_shards']} of them by an earlier run")
        else:
            rate = int(result["source_bytes"] / max(result["seconds"], 1e-3))
            # Empty if every tensor was copied.
            by = ", ".join(_by(f"{s['name']} quantizer", s["hosts"]) for s in result["quantizers"])
            out.line(f"{line}, {size(rate)}/s{by and f' ({by})'}")
    if result["requantization_errors"]:
        out.line()
        show_requantization_errors(out, result["requantization_errors"])
        out.line()
    if result["gptq_errors"]:
        out.line()
        out.table(
            [
                "format",
                "projection",
                "device",
                ">weights",
                ">kept nearest",
                ">error of outputs / nearest",
            ],
            [
                (
                    *(e[key] for key in ("format", "projection", "device", "weights", "unchanged")),
                    f"{e['ratio']:.3f}",
                )
                for e in result["gptq_errors"]
            ],
        )
        out.line()
    _show_kept_layers(out, result["kept_layers"])
    if result["engines"]:
        engines = [f"{e['engine']} {e['version']} {_LOADS[e['loads']]}" for e in result["engines"]]
        out.line(f"Engines that load it: {', '.join(engines)}.")
    out.line(f"To check it: {result['next']}")
