"""Tasks that time whole models: how they load, and how they are served."""

from __future__ import annotations

from checkpoints import MODELS, path_of, task_of
from task import Task
from tests_on_gpus import PYTEST

SERVE = "{python} -m moequant bench serve"
VLLM_TESTS = "tests/engines/test_vllm.py"
_BOTH = "--engine vllm,vllm+moequant --profile --rounds 8"
_PLUG_IN = "--engine vllm+moequant"
_TRITON = "--attention-backend TRITON_ATTN"
_MLA = "--attention-backend TRITON_MLA"


def _load(format):
    path = path_of("layers", format)
    prepare = f"{{python}} -m moequant prepare {path} --target sm90 --overwrite --quiet"
    return Task(
        name=f"load-{format}",
        commands=(
            prepare,
            f"{{python}} -m moequant bench load {path} --json > {{out}}/load.json",
        ),
        estimate_s=45,
        limit_s=200,
        needs=("sm90",),
        after=(task_of("layers"),),
    )


def _serve(name, model, format, options, *, gpus=1, needs=("vllm",), **fields):
    return Task(
        name=f"serve-{name}",
        commands=(f"{SERVE} {path_of(model, format)} {options} --output {{out}}/serve.json",),
        estimate_s=200,
        limit_s=900,
        gpus=gpus,
        needs=("sm90", *needs),
        after=(task_of(model),),
        **fields,
    )


def _serve_alone(format):
    """With our experts and no engine; transformers itself runs few of our formats."""
    engines = "--engine moequant,moequant+compile"
    return _serve(f"moequant-{format}", "qwen3-30b", format, engines, needs=("transformers",))


_TWO = "--tensor-parallel 2"
_DIVIDED = f"{_TWO} --expert-parallel"
_SERVED = [
    *(
        _serve(f"qwen3-30b-{format}", "qwen3-30b", format, f"{_BOTH} {_TRITON}")
        for format in MODELS["qwen3-30b"].formats
    ),
    _serve(
        "qwen3-30b-mxfp4_fp8",
        "qwen3-30b",
        "mxfp4",
        f"{_PLUG_IN} {_TRITON} --activations fp8_token",
    ),
    _serve("gpt-oss", "gpt-oss-20b", "mxfp4", f"{_BOTH} {_TRITON}"),
    *(
        _serve(f"deepseek-v3-{format}", "deepseek-v3", format, f"{_BOTH} {_MLA}")
        for format in MODELS["deepseek-v3"].formats
    ),
    # Not w4a8: vLLM's CUTLASS experts want multiples of 256 rows on each GPU, and 768 rows are cut.
    _serve("qwen3-30b-tensor-parallel", "qwen3-30b", "mxfp4", f"{_BOTH} {_TRITON} {_TWO}", gpus=2),
    _serve("qwen3-30b-experts", "qwen3-30b", "fp8_block", f"{_BOTH} {_TRITON} {_DIVIDED}", gpus=2),
    _serve("gpt-oss-tensor-parallel", "gpt-oss-20b", "mxfp4", f"{_BOTH} {_TRITON} {_TWO}", gpus=2),
    _serve(
        "deepseek-v3-experts",
        "deepseek-v3",
        "fp8_block",
        f"{_BOTH} {_MLA} {_DIVIDED}",
        gpus=2,
        # With DeepGEMM, vLLM 0.22.1 alone stops there: "pointer resides on host memory".
        environment=(("VLLM_USE_DEEP_GEMM", "0"),),
    ),
    *map(_serve_alone, MODELS["qwen3-30b"].formats),
]


def _vllm_tests(name, words, *, gpus=1, beside=2, estimate_s=300):
    return Task(
        name=f"vllm-{name}",
        commands=(f"{PYTEST} -n {{jobs}} {VLLM_TESTS} -k '{words}'",),
        estimate_s=estimate_s,
        limit_s=1200,
        gpus=gpus,
        beside=beside,
        needs=("vllm", "transformers"),
    )


_TESTED = [
    _vllm_tests("qwen3_moe", "qwen3_moe and not two_gpus"),
    _vllm_tests("mixtral", "mixtral"),
    _vllm_tests("deepseek_v3", "deepseek_v3"),
    _vllm_tests("gpt_oss", "gpt_oss and not two_gpus", estimate_s=100),
    _vllm_tests("graphs", "cuda_graphs"),
    _vllm_tests("two-gpus", "two_gpus", gpus=2, estimate_s=330),
]


def _soak(format):
    return Task(
        name=f"soak-{format}",
        commands=(
            f"{{python}} tests/engines/soak.py {path_of('qwen3-30b', format)} --minutes 10 "
            "--clients 64 --beside --json {out}/soak.json -- --gpu-memory-utilization 0.3 "
            + _TRITON,
        ),
        estimate_s=780,
        limit_s=900,
        beside=2,
        needs=("sm90", "vllm", "uvicorn"),
        after=(task_of("qwen3-30b"),),
    )


_SERVED_LONG = [
    # Of each kind of activations, in BF16 and quantized.
    *map(_soak, ("mxfp4", "fp8_block")),
    Task(
        name="first-start",
        commands=(
            f"{{python}} tests/gpu_checks/first_start.py {path_of('qwen3-30b', 'w4a8')} "
            f"--json {{out}}/first_start.json -- --gpu-memory-utilization 0.6 {_TRITON}",
        ),
        estimate_s=450,
        limit_s=900,
        needs=("sm90", "vllm", "uvicorn"),
        after=(task_of("qwen3-30b"),),
    ),
]
TASKS = [*map(_load, MODELS["layers"].formats), *_SERVED, *_TESTED, *_SERVED_LONG]
