"""How a checkpoint was made: command, recipe, versions, digests, time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.reporting.markup import Markup, code, element, join, table
from moequant.reporting.words import number, seconds
from moequant.units import count, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def origin_section(output: Mapping[str, Any]) -> Markup:
    """What moequant.json and a saved result of convert say; empty if there is neither."""
    origin, conversion = output["origin"], output["conversion"]
    if origin is None and conversion is None:
        return Markup("")
    parts = [element("h2", "How it was made")]
    if origin is not None:
        parts += _of_origin(origin, conversion)
    else:
        parts.append(_fields(_of_conversion(conversion)))
    return element("section", parts)


def _of_origin(origin: Mapping[str, Any], conversion: Mapping[str, Any] | None) -> list[Markup]:
    source = origin["source"]
    fields: dict[str, str | Markup] = {
        "source": " ".join(
            filter(None, (source["repository"], source["commit"] and f"commit {source['commit']}"))
        ),
        "versions": ", ".join(
            f"{name} {origin[name]}" for name in ("moequant", "torch") if origin[name]
        ),
        "quantizer": ", ".join(
            dict.fromkeys(share["name"] for share in origin["quantizers"] if share["name"])
        ),
        **_of_conversion(conversion),
        **_digests(origin),
    }
    parts = [_fields(fields)]
    if origin["recipe"] is not None:
        parts += [
            element(
                "p",
                "A command that makes it again, by the recipe in moequant.json; the one that was "
                "used is not recorded:",
            ),
            element("pre", code(origin["command"])),
            element("details", element("summary", "recipe.toml"), _pre(origin["recipe"]["toml"])),
        ]
    if origin["gptq_errors"]:
        parts.append(_gptq(origin["gptq_errors"]))
    if origin["files"]:
        parts.append(_files(origin["files"]))
    return parts


def _of_conversion(conversion: Mapping[str, Any] | None) -> dict[str, str | Markup]:
    if conversion is None:
        return {}
    time = seconds(conversion["seconds"])
    if conversion["resumed_shards"]:
        kept = count(conversion["resumed_shards"], "shard")
        time += f", the last run alone; {kept} of earlier ones"
    elif conversion["seconds"] > 0:
        rate = conversion["source_bytes"] / conversion["seconds"]
        time += f", {size(round(rate))}/s of the source"
    workers = count(conversion["workers"], "worker")
    memory = f"{size(conversion['peak_bytes'])} by the plan, {workers}"
    if (held := conversion["resident_bytes"]) is not None:
        memory += f"; the process with Python and torch held at most {size(held)}"
    return {"time of the conversion": time, "peak memory": memory}


def _digests(origin: Mapping[str, Any]) -> dict[str, str | Markup]:
    source = origin["source"]
    found = {
        "SHA-256 of the plan": origin["plan_sha256"],
        "of the source's config.json": source["config_sha256"],
        "of samples of its weights": source["sample_sha256"],
        "of the statistics": origin["statistics"],
        "of the activation scales": origin["activation_scales"],
    }
    return {name: code(digest) for name, digest in found.items() if digest}


def _fields(fields: Mapping[str, str | Markup]) -> Markup:
    entries = (
        join(element("dt", name), element("dd", value)) for name, value in fields.items() if value
    )
    return element("dl", entries, class_="fields")


def _pre(text: str) -> Markup:
    return element("pre", element("code", text))


def _gptq(errors: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [
        (error["format"] or "", error["projection"] or "", number(error["ratio"]))
        for error in errors
    ]
    columns = ["format", "projection", ">error of outputs, of that with the nearest codes"]
    return table(columns, rows, caption="What GPTQ gained, by the statistics")


def _files(files: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [(code(one["file"]), size(one["bytes"]), code(one["sha256"])) for one in files]
    content = table(["file", ">size", "SHA-256"], rows, caption="Files, by moequant.json")
    return element("details", element("summary", f"{count(len(files), 'file')}"), content)
