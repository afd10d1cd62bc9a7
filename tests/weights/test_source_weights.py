"""Experts that share a tensor, in every way there is to stack them."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from moequant.models import Model, StackedExperts, find_architecture
from moequant.models.model import read_model
from moequant.storage.buffers import Arena
from moequant.storage.checkpoint import Checkpoint
from moequant.weights.source_weights import PartInfo, read_weights, unstacked

E, H, I = 3, 4, 4  # H = I: no shape tells how a stack lies
CONFIG = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "num_local_experts": E,
    "num_experts_per_tok": 1,
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 1,
}
BLOCK = "model.layers.0.mlp.experts"
WAYS = list(itertools.product([False, True], repeat=2))


def weights():
    """gate, up [E, I, H] and down [E, H, I], every element different."""
    values = torch.arange(3 * E * H * I).bfloat16()
    return dict(zip(("gate", "up", "down"), values.view(3, E, H, I), strict=True))


def stacked(transposed, interleaved):
    """The same in two tensors."""
    w = weights()
    if interleaved:
        gate_up = torch.stack([w["gate"], w["up"]], 2).flatten(1, 2)
    else:
        gate_up = torch.cat([w["gate"], w["up"]], 1)
    found = {f"{BLOCK}.gate_up_proj": gate_up, f"{BLOCK}.down_proj": w["down"]}
    return {n: (t.mT if transposed else t).contiguous() for n, t in found.items()}


def open_stacked(path, monkeypatch, transposed, interleaved) -> tuple[Checkpoint, Model]:
    biases = {
        f"{BLOCK}.gate_up_proj_bias": torch.zeros(E, 2 * I),
        f"{BLOCK}.down_proj_bias": torch.zeros(E, H),
    }
    save_file(stacked(transposed, interleaved) | biases, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    table = find_architecture(CONFIG).stacked
    other = StackedExperts(
        table.tensors | {"transposed": transposed, "interleaved": interleaved, "biased": True}
    )
    monkeypatch.setattr(find_architecture(CONFIG), "stacked", other)
    checkpoint = Checkpoint.open(path)
    return checkpoint, read_model(checkpoint.config, checkpoint.tensors)


@pytest.mark.parametrize(("transposed", "interleaved"), WAYS)
@pytest.mark.parametrize("arena", [None, Arena()])
def test_every_expert_is_read_as_it_was_before_it_was_stacked(
    tmp_path, monkeypatch, transposed, interleaved, arena
):
    checkpoint, model = open_stacked(tmp_path, monkeypatch, transposed, interleaved)
    infos = unstacked(checkpoint.tensors, model)
    for projection, wanted in weights().items():
        for expert in range(E):
            info = infos[f"{BLOCK}.{expert}.{projection}_proj.weight"]
            assert isinstance(info, PartInfo)
            assert (info.dtype, info.size_bytes) == ("BF16", 2 * H * I)
            (read,) = read_weights(checkpoint, [info], arena)
            assert read.is_contiguous()
            assert torch.equal(read, wanted[expert])


def test_an_expert_that_gate_and_up_share_is_read_once(tmp_path, monkeypatch):
    checkpoint, model = open_stacked(tmp_path, monkeypatch, transposed=True, interleaved=True)
    infos = unstacked(checkpoint.tensors, model)
    read_all, reads = Checkpoint.read_all, []
    monkeypatch.setattr(Checkpoint, "read_all", lambda *a: reads.extend(a[1]) or read_all(*a))
    pair = [infos[f"{BLOCK}.2.{name}_proj.weight"] for name in ("gate", "up")]
    gate, up = read_weights(checkpoint, pair)
    assert reads == [(f"{BLOCK}.gate_up_proj", slice(2, 3))]
    assert torch.equal(gate, weights()["gate"][2])
    assert torch.equal(up, weights()["up"][2])


def test_stacks_are_replaced_where_they_stand_and_all_else_stays(tmp_path, monkeypatch):
    checkpoint, model = open_stacked(tmp_path, monkeypatch, transposed=False, interleaved=False)
    wanted = [f"{BLOCK}.{e}.down_proj.weight" for e in range(E)]
    wanted += [f"{BLOCK}.down_proj_bias"]
    wanted += [f"{BLOCK}.{e}.{p}_proj.weight" for e in range(E) for p in ("gate", "up")]
    wanted += [f"{BLOCK}.gate_up_proj_bias"]
    assert list(unstacked(checkpoint.tensors, model)) == wanted
