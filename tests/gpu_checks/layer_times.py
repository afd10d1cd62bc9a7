"""Tasks that time layers of experts, each alone on its GPU."""

from __future__ import annotations

from task import Task

BENCH = "{python} -m moequant bench experts"
_ALL = "all,128x2880x2880x4"
"""And gpt-oss-120b with SiLU and without biases."""
_IN_128 = "qwen3-30b,qwen3-235b,deepseek-v3,mixtral-8x7b"
"""Sizes that are multiples of 128, which w4a8 needs."""
_WAYS = {
    "fp8_block": "--format fp8_block",
    "fp8_channel": "--format fp8_channel",
    "w4a8": "--format w4a8",
    "mxfp4": "--format mxfp4",
    "mxfp4_fp8": "--format mxfp4 --activations fp8_token",
    "nvfp4": "--format nvfp4",
}
_TUNED_TOKENS = "1,8,32,128,512,2048,8192"
_HUMMING = ("w4a8", "mxfp4", "mxfp4_fp8", "nvfp4")
"""What benchmarks/humming.py times."""


def _experts(name):
    shapes = _IN_128 if name == "w4a8" else _ALL
    return Task(
        name=f"experts-{name}",
        commands=(
            f"{BENCH} --shape {shapes} {_WAYS[name]} --routing uniform,skewed "
            "--output {out}/experts.json",
        ),
        estimate_s=150,
        limit_s=600,
        needs=("sm90",),
    )


def _beside_humming(name):
    return Task(
        name=f"humming-{name}",
        commands=(
            f"{BENCH} --shape mixtral-8x7b {_WAYS[name]} --against humming "
            "--output {out}/experts.json",
        ),
        estimate_s=90,
        limit_s=300,
        needs=("sm90", "humming"),
    )


def _tune(name):
    """A table of tilings for this GPU, to be put into kernels/sm90/tunings."""
    return Task(
        name=f"tune-{name}",
        commands=(
            f"{{python}} -m moequant tune --shape {_IN_128 if name == 'w4a8' else 'all'} "
            f"{_WAYS[name]} --tokens {_TUNED_TOKENS} --output {{out}}/table.json --json "
            "> {out}/tune.json",
        ),
        estimate_s=600,
        limit_s=1800,
        needs=("sm90",),
        by_name=True,
    )


TASKS = [
    *map(_experts, _WAYS),
    *map(_tune, _WAYS),
    *map(_beside_humming, _HUMMING),
    Task(
        name="experts-cutlass_fp8",
        commands=(
            f"{BENCH} --shape {_ALL} {_WAYS['fp8_channel']} --backend cutlass_fp8 "
            "--output {out}/experts.json",
        ),
        estimate_s=50,
        limit_s=600,
        needs=("sm90", "cutlass"),
    ),
]
