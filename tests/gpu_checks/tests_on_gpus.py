"""Tasks that check: suites of tests, compute-sanitizer, and the self-test.

Several of them share a GPU. A test that was skipped, for example for want of a package, is not
checked; logs have the reasons.
"""

from __future__ import annotations

from task import Task

PYTEST = "{python} -P -m pytest -p no:cacheprovider -W ignore -q -rs"
SM90 = "tests/runtime/test_sm90.py"
SHARDS = {
    "fp8_block": "fp8_block",
    "fp8_channel": "fp8_channel",
    "fp8_tensor": "fp8_tensor",
    "w4a8": "w4a8",
    "mxfp4_fp8": "mxfp4_fp8",
    "mxfp4_far_fp8": "mxfp4_far",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4 and not mxfp4_fp8 and not mxfp4_far",
}
"""Of the tests in test_sm90.py, by key of its TILINGS: words for -k. No test has those of two."""
REST = " and ".join(
    f"not {word}" for word in ("fp8_block", "fp8_channel", "fp8_tensor", "w4a8", "nvfp4", "mxfp4")
)
REAL = "real_models"
KERNEL_TESTS = {
    "cutlass": "tests/kernels/cutlass",
    "portable": "tests/kernels/portable",
    "rest": "tests/kernels --ignore tests/kernels/cutlass --ignore tests/kernels/portable",
}
"""Tests of kernels by themselves: paths for pytest. Triton compiles for most of them."""
_ELSEWHERE = (
    "tests/engines",
    "tests/kernels",
    "tests/models",  # of the newest transformers, without one that uses a GPU
    SM90,
    "tests/runtime/test_shared_gpu.py",
    "tests/runtime/test_hopper_libraries.py",
    "tests/runtime/test_deepgemm_fp4.py",
)
"""Tests on GPUs that are not run with all others."""


def _suite(name, arguments, **fields):
    """Tests, by arguments of pytest, that share a GPU with two other tasks."""
    return Task(name=name, commands=(f"{PYTEST} -n {{jobs}} {arguments}",), beside=3, **fields)


def _shard(name, words):
    return _suite(
        f"sm90-{name}",
        f"-m gpu {SM90} -k '{words} and not {REAL}'",
        estimate_s=120,
        limit_s=600,
        needs=("sm90",),
    )


def _sanitize(case, tool):
    return Task(
        name=f"{tool}-{case}",
        commands=(
            f"compute-sanitizer --tool {tool} --error-exitcode 9 "
            "--kernel-name kernel_substring=grouped_gemm "
            f"{{python}} tests/gpu_checks/each_tiling.py {case}",
        ),
        estimate_s=100,
        limit_s=600,
        beside=4,
        needs=("sm90", "compute-sanitizer"),
        # A tensor has memory of its own, so that memcheck sees what is read behind it.
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
    )


def _of_kernels(name, paths):
    # Those of speed have a task of their own, alone on its GPU.
    return _suite(
        f"kernels-{name}", f"{paths} -k 'not speed'", estimate_s=240, limit_s=900, safe_path=False
    )


TASKS = [
    *(_shard(name, words) for name, words in SHARDS.items()),
    _shard("rest", REST),
    Task(
        name="sm90-real-models",
        commands=(f"{PYTEST} -n {{large_jobs}} -m gpu {SM90} -k {REAL}",),
        estimate_s=180,
        limit_s=900,
        needs=("sm90",),
    ),
    Task(
        name="shared-gpu",
        commands=(f"{PYTEST} tests/runtime/test_shared_gpu.py",),
        estimate_s=60,
        limit_s=300,
        needs=("sm90",),
    ),
    *(_of_kernels(name, paths) for name, paths in KERNEL_TESTS.items()),
    Task(
        name="quantizer-rates",
        commands=(f"{PYTEST} -s tests/kernels/test_block_scaled_quantize.py -k speed",),
        estimate_s=20,
        limit_s=200,
    ),
    _suite(
        "all-others",
        "-m gpu tests " + " ".join(f"--ignore {path}" for path in _ELSEWHERE),
        estimate_s=400,
        limit_s=900,
    ),
    _suite(
        "hopper-libraries",
        "tests/runtime/test_hopper_libraries.py",
        estimate_s=95,
        limit_s=400,
        needs=("sm90",),
    ),
    _suite(
        "deepgemm",
        "tests/runtime/test_deepgemm_fp4.py",
        estimate_s=20,
        limit_s=400,
        needs=("deep_gemm",),
    ),
    Task(
        name="first-call",
        commands=("{python} tests/gpu_checks/first_call.py --json {out}/first_call.json",),
        estimate_s=130,
        limit_s=600,
        beside=2,
        needs=("sm90", "cutlass"),
    ),
    *(_sanitize(case, tool) for tool in ("memcheck", "racecheck") for case in SHARDS),
    Task(
        name="selftest",
        commands=("{python} -m moequant selftest --json > {out}/selftest.json",),
        estimate_s=80,
        limit_s=400,
    ),
]
