"""Models of random weights that tasks share, and the tasks that write them."""

from __future__ import annotations

from dataclasses import dataclass

from task import Task


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with the sizes of a release and fewer layers.

    Attributes:
        shape: its name in `moequant.benchmarks.random_models`.
        room_gb: of its source and what it is converted into, prepared too where tasks do that.
    """

    shape: str
    layers: int
    vocabulary: int
    formats: tuple[str, ...]
    room_gb: int
    estimate_s: int


MODELS = {
    "qwen3-30b": Model(
        shape="qwen3-30b",
        layers=24,
        vocabulary=32768,
        formats=("fp8_block", "mxfp4", "w4a8"),
        room_gb=70,
        estimate_s=85,
    ),
    "gpt-oss-20b": Model(
        shape="gpt-oss-20b",
        layers=24,
        vocabulary=32768,
        formats=("mxfp4",),
        room_gb=55,
        estimate_s=110,
    ),
    "deepseek-v3": Model(
        shape="deepseek-v3",
        layers=4,
        vocabulary=32768,
        formats=("fp8_block", "mxfp4", "w4a8"),
        room_gb=154,
        estimate_s=220,
    ),
    "layers": Model(
        shape="qwen3-30b",
        layers=6,
        vocabulary=4096,
        formats=(
            "fp8_block", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "mxfp4", "mxfp8",
            "nvfp4", "w4a8",
        ),
        room_gb=60,
        estimate_s=45,
    ),
}  # fmt: skip
"""By name of the task, behind "model-", and of the folders."""


def task_of(model):
    """The task that writes a model."""
    return f"model-{model}"


def path_of(model, format):
    """Where it is in a format, as words of a command line."""
    assert format in MODELS[model].formats
    return f"{{folder}}/{model}.{format}"


def _task(name, model):
    return Task(
        name=task_of(name),
        commands=(
            f"{{python}} tests/gpu_checks/random_checkpoints.py {model.shape} {model.layers} "
            f"{model.vocabulary} {{folder}}/{name} {' '.join(model.formats)} --workers {{cores}}",
        ),
        estimate_s=model.estimate_s,
        limit_s=900,
        beside=4,
        makes=tuple(f"{name}.{format}" for format in model.formats),
        room_gb=model.room_gb,
    )


TASKS = [_task(name, model) for name, model in MODELS.items()]
