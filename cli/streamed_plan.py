"""What the plans of `calibrate` and `evaluate` say alike: both run a model over text by layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.cli.output import size

if TYPE_CHECKING:
    from collections.abc import Mapping


def describe_data(parts: str, *, chat_template: bool) -> str:
    """The data in `parts`, and whether a chat template made texts of messages."""
    applied = "applied to messages" if chat_template else "not applied"
    return f"{parts}; chat template {applied}"


def describe_computation(run: Mapping[str, str]) -> str:
    """Dtype and device of `facts_of_run`."""
    return f"{run['dtype']} on {run['device']}"


def describe_needs(peak_bytes: int, disk_bytes: int) -> dict[str, str]:
    """Fields of a plan: memory and disk that it takes."""
    return {
        "peak memory": f"{size(peak_bytes)}, besides torch, transformers and moequant",
        "disk": size(disk_bytes),
    }
