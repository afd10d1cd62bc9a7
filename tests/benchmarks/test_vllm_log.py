from __future__ import annotations

import pytest

from moequant.benchmarks.vllm_log import add_cause, find_experts

_AT = "(Worker_TP0 pid=7) ERROR 11-26 14:20:11 [multiproc_executor.py:870] "
_TRACEBACK = f"{_AT}WorkerProc failed.\n{_AT}Traceback (most recent call last):\n{_AT}  File\n"


@pytest.mark.parametrize(
    ("log", "error", "reason"),
    [
        ("", "it ended", "it ended"),
        ("ERROR 11-26 14:20:11 [registry.py:1] ImportError: x", "it ended", "it ended"),
        (
            f"{_TRACEBACK}{_AT}AssertionError\n{_AT}\n{_AT}During handling\n{_AT}OSError: y",
            "it ended",
            "it ended; a process raised AssertionError",
        ),
        (
            f"{_TRACEBACK}{_AT}RuntimeError: [enforce fail at x.cpp:3] ValueError: x",
            "it ended",
            "it ended; a process raised RuntimeError: [enforce fail at x.cpp:3] ValueError: x",
        ),
        (f"{_TRACEBACK}{_AT}a.b.Gone: no memory", "Worker: 'no memory'", "Worker: 'no memory'"),
    ],
)
def test_what_a_worker_raised_is_part_of_the_reason(log, error, reason):
    assert add_cause(error, log) == reason


_OURS = "moequant runs routed experts in mxfp4 (dialect gpt-oss, E 4) by its backend {} on cuda:0"


@pytest.mark.parametrize(
    ("lines", "ours", "theirs"),
    [
        ([], None, None),
        (["INFO [x.py:1] Using FLASH_ATTN attention backend."], None, None),
        ([_OURS.format("a"), _OURS.format("b"), _OURS.format("a")], "a, b", None),
        (["INFO [x.py:1] Using 'MARLIN' Mxfp4 MoE backend."], None, "'MARLIN' Mxfp4 MoE"),
        (
            ["Using TRITON Fp8 MoE backend out of potential backends: ['TRITON', 'AITER']."],
            None,
            "TRITON Fp8 MoE",
        ),
        (["Using CompressedTensorsW4A4MoEMethod"], None, "CompressedTensorsW4A4MoEMethod"),
        (["Using TritonExperts for CompressedTensors"], None, "TritonExperts"),
    ],
)
def test_the_experts_that_vllm_names_are_found_once_each(lines, ours, theirs):
    log = "\n".join(lines)
    assert find_experts(log, plug_in=True) == ours
    assert find_experts(log, plug_in=False) == theirs
