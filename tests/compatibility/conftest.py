"""Small converted checkpoints, and copies of them with something wrong."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from moequant import convert
from moequant.compatibility import check_checkpoint
from moequant.storage.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def converted(make_checkpoint, tmp_path_factory):
    """converted(format, dialect, model_type=, **settings): the folder, made once."""
    made = {}

    def make(format, dialect=None, *, model_type="qwen3_moe", sizes=(), **settings):
        key = format, dialect, model_type, tuple(sizes), repr(settings)
        if key not in made:
            source = make_checkpoint(model_type=model_type, **dict(sizes))
            made[key] = tmp_path_factory.mktemp(f"{model_type}-{format}") / "out"
            convert(source, made[key], format=format, dialect=dialect, **settings)
        return made[key]

    return make


@pytest.fixture
def planted(converted, tmp_path):
    """planted(*converted's arguments, tensors=, config=): a copy with changed tensors or config.

    `tensors` changes the tensors of all shards, a dict by name; `config` the quantization_config.
    """

    def plant(*args, tensors=None, config=None, **settings):
        path = tmp_path / "planted"
        shutil.copytree(converted(*args, **settings), path)
        document = json.loads((path / "config.json").read_text())
        if config is not None:
            config(document["quantization_config"])
            (path / "config.json").write_text(json.dumps(document))
        if tensors is not None:
            _change(path, tensors)
        return path

    plant.original = converted
    return plant


def _change(path, change):
    shards = sorted(path.glob("*.safetensors"))
    held = {name: t for shard in shards for name, t in load_file(shard).items()}
    change(held)
    for shard in shards:
        shard.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def check():
    """check(path, **asked): the report, with the engines by key."""

    def check(path, **asked):
        report = check_checkpoint(Checkpoint.open(path), **asked)
        return {engine.key: engine for engine in report.engines}

    return check
