"""What a report does not have, and the command that measures it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def find_gaps(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Sentences `what` was not measured, of which output (`of`), and `how` to measure it."""
    outputs = document["outputs"]
    gaps = [gap for output in outputs for gap in _of_output(output, document)]
    if document["calibration"] is None:
        gaps += _of_calibration(outputs)
    return gaps


def _of_output(output: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    path, source = shlex.quote(output["path"]), shlex.quote(document["source"] or "SOURCE")
    verification = output["verification"]
    if verification is None:
        yield {
            "of": output["name"],
            "what": "It was not compared with its source: errors of weights, the heat maps, and "
            "whether the bytes are those that the source gives.",
            "how": f"moequant report {path} --against {source}",
        }
    elif not verification["errors"] and verification["counts"].get("converted"):
        yield {
            "of": output["name"],
            "what": "The result of verify does not have the errors of layers and experts: no "
            "weights were compared, or an earlier version wrote it.",
            "how": f"moequant report {path} --against {source}",
        }
    elif output["before"] is None:
        yield {
            "of": output["name"],
            "what": "The headers of its source were not read: bytes before, by role.",
            "how": f"moequant report {path} --verified FILE --against {source}",
        }
    if output["evaluated_as"] is None:
        yield {
            "of": output["name"],
            "what": "What it predicts was not compared with what its source predicts: KL "
            "divergence, same top token, perplexity.",
            "how": f"moequant evaluate {source} {path} --data held-out.txt --noise-floor --json "
            "> evaluation.json, then --evaluation evaluation.json",
        }
    if output["conversion"] is None:
        yield {
            "of": output["name"],
            "what": "moequant.json does not have time and memory of a conversion.",
            "how": "moequant convert ... --json > conversion.json, then --conversion "
            "conversion.json",
        }
    for key, reason in output["not_read"].items():
        yield {
            "of": output["name"],
            "what": f"{_PARTS[key]} could not be read: {reason}",
            "how": "",
        }


_PARTS = {
    "origin": "moequant.json",
    "compatibility": "What engines need to know",
    "after": "The sizes by role",
    "codes": "Codes and scales",
    "faulty_weights": "The weights that problems name",
}


def _of_calibration(outputs: list[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for output in outputs:
        if output["origin"] and output["origin"]["statistics"]:
            yield {
                "of": output["name"],
                "what": "It was made with statistics, whose file was not given: what each expert "
                "saw.",
                "how": "--statistics STATS",
            }
