"""Static scales of activations, read from the files of a converted checkpoint."""

from __future__ import annotations

import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moequant.conversion import convert
from moequant.errors import CheckpointError
from moequant.weights.converted import ConvertedCheckpoint

PATTERN = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.input_scale")


def value_of(layer, expert, projection):
    """A number that bfloat16 holds; of even experts gate's is the larger one, else up's."""
    up = 0.5 if expert % 2 else -0.5
    return 8.0 * (layer + 1) + expert + {"gate": 0.0, "up": up, "down": 0.25}[projection]


@pytest.fixture(scope="module")
def path(make_checkpoint, tmp_path_factory):
    """A checkpoint in several files, whose scales differ, as do their dtypes and shapes."""
    out = tmp_path_factory.mktemp("converted") / "out"
    settings = {"format": "fp8_tensor", "activation_scales": 1.0, "max_shard_size": "300KB"}
    converted = convert(make_checkpoint(), out, **settings).output
    for file in converted.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if found := PATTERN.fullmatch(name):
                layer, expert, projection = int(found[1]), int(found[2]), found[3]
                scale = torch.tensor([value_of(layer, expert, projection)])
                if projection == "down":
                    scale = scale.bfloat16() if expert % 2 else scale.reshape(())
                tensors[name] = scale
        save_file(tensors, file, metadata={"format": "pt"})
    return converted


def open_converted(path):
    return ConvertedCheckpoint.open(path, quantized_activations=True)


@pytest.mark.parametrize("experts", [[0, 1, 2, 3], [3, 1], [2]])
def test_each_expert_has_its_own_scale_and_the_larger_of_gate_and_up(path, experts):
    read = open_converted(path).read_input_scales(1, experts)
    first = [max(value_of(1, e, "gate"), value_of(1, e, "up")) for e in experts]
    down = [value_of(1, e, "down") for e in experts]
    assert {name: scale.tolist() for name, scale in read.items()} == {
        "gate_up_input_scale": first,
        "down_input_scale": down,
    }
    assert {scale.dtype for scale in read.values()} == {torch.float32}
    assert all(s.untyped_storage().nbytes() == s.nbytes for s in read.values())


def test_each_file_is_opened_once_for_each_dtype_of_scales(path, monkeypatch):
    converted = open_converted(path)
    opened, call = [], os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: opened.append(p) or call(p, *a, **k))
    converted.read_input_scales(0, range(4))
    infos = [info for name, info in converted.checkpoint.tensors.items() if PATTERN.match(name)]
    files = {(info.file, info.dtype) for info in infos if ".layers.0." in info.name}
    assert len({file for file, _ in files}) > 1
    assert sorted(p.name for p in opened) == sorted(file for file, _ in files)


def test_a_scale_that_is_no_single_number_is_refused_by_name(path, monkeypatch):
    converted = open_converted(path)
    tensors = dict(converted.checkpoint.tensors)
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    monkeypatch.setattr(type(converted.checkpoint), "info", lambda self, n: tensors[n])
    for change, said in (
        ({"shape": (2,)}, r"torch\.float32 of shape \[2\], but a static scale is one floating"),
        ({"shape": (), "dtype": "I32"}, r"torch\.int32 of shape \[\], but a static scale is one"),
    ):
        tensors[name] = converted.checkpoint.tensors[name]._replace(**change)
        with pytest.raises(CheckpointError, match=f"^{re.escape(name)}: {said}"):
            converted.read_input_scales(0, range(4))
