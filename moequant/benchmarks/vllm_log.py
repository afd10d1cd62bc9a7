"""What vLLM prints about its experts and its failures."""

from __future__ import annotations

import re

from moequant.integrations.vllm.name import BY_BACKEND, RUNS_EXPERTS

_OUR_EXPERTS = re.compile(rf"{RUNS_EXPERTS} .* {BY_BACKEND} (\S+)")
_VLLM_EXPERTS = re.compile(r"Using (.+? MoE(?= backend)|\w+MoEMethod|\w+Experts(?= for ))")
"""As vLLM 0.22.1 and 0.33.0 log them, such as "Using TRITON Fp8 MoE backend out of ..."."""
_ERROR = re.compile(r"\bERROR [^\[]*\[[^\]]+:\d+\] (.*)")
"""A line that vLLM logs as an error, with what follows its prefix."""


def find_experts(log: str, *, plug_in: bool) -> str | None:
    """What computes the routed experts.

    Args:
        log: what a process with vLLM printed.
        plug_in: whether to look for our backends, and not for those of vLLM.

    Returns:
        Their names, in the order of the log; None if it has none.
    """
    pattern = _OUR_EXPERTS if plug_in else _VLLM_EXPERTS
    return ", ".join(dict.fromkeys(pattern.findall(log))) or None


def add_cause(error: str, log: str) -> str:
    """An engine's error, with what a process of vLLM's raised: vLLM says only that one failed.

    Args:
        error: in one line.
        log: what the engine printed.
    """
    raised = _first_raised(log)
    message = (raised or "").partition(": ")[2]
    if raised is None or (message and message in error):
        return error
    return f"{error}; a process raised {raised}"


def _first_raised(log: str) -> str | None:
    """The first exception with a traceback; of a chain, the first."""
    traced = False
    for found in filter(None, map(_ERROR.search, log.splitlines())):
        text = found[1]
        if text.startswith("Traceback (most recent call last)"):
            traced = True
        elif traced and text and not text[0].isspace():
            return text
    return None
