"""What a model must not do to be run layer by layer, and what is said if it does."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moequant.errors import UnsupportedError
from moequant.integrations import layerwise
from moequant.integrations.layerwise import LayerwiseModel
from moequant.storage.checkpoint import Checkpoint
from moequant.weights.source_model import read_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    path = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def model(folder):
    checkpoint = Checkpoint.open(folder)
    source = read_source(checkpoint.tensors, checkpoint.config)
    found = LayerwiseModel(checkpoint, source, dtype=torch.float32, device=torch.device("cpu"))
    found.load_rest()
    return found


IDS = torch.arange(3, 15).view(2, 6)


def run_all(model):
    with model.embedding():
        embedded = model.embed(IDS)
    before = None
    for index in range(len(model.layers)):
        with model.layer(index):
            before = model.run(index, IDS, embedded, before)
    return before


def test_only_the_layer_in_use_has_weights(model):
    before = torch.zeros(2, 6, 32)
    with model.layer(1):
        held = [i for i, m in enumerate(model.layers) if not any(p.is_meta for p in m.parameters())]
        model.run(1, IDS, before, before)
    assert held == [1]
    assert all(p.is_meta for layer in model.layers for p in layer.parameters())
    assert model.decoder.embed_tokens.weight.is_meta


def test_a_layer_that_takes_what_an_earlier_one_returned_is_refused(model, monkeypatch):
    kept = {}
    layer_class = type(model.layers[0])
    call = layer_class.__call__

    # As a decoder that keeps a layer's result in a variable: beyond what `forward` is given.
    def with_first(self, hidden, *args, **kwargs):
        index = [*model.layers].index(self)
        if index == 2:
            hidden = hidden + kept[0]
        kept[index] = call(self, hidden, *args, **kwargs)
        return kept[index]

    monkeypatch.setattr(layer_class, "__call__", with_first)
    with pytest.raises(UnsupportedError, match="layer 2 of a mixtral takes NaN: either"):
        run_all(model)


def test_a_layer_that_returns_something_else_is_refused(model, monkeypatch):
    layer_class = type(model.layers[0])
    forward = layer_class.forward
    monkeypatch.setattr(
        layer_class, "forward", lambda self, *args, **kwargs: {"y": forward(self, *args, **kwargs)}
    )
    with pytest.raises(UnsupportedError, match="layer 0 of a mixtral returns a dict"):
        run_all(model)


def test_a_decoder_without_a_list_of_layers_is_refused(folder, monkeypatch):
    monkeypatch.setattr(layerwise, "decoder_module", lambda model: torch.nn.Linear(1, 1))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UnsupportedError, match="Linear: neither `layers` nor `blocks`"):
        LayerwiseModel(
            checkpoint,
            read_source(checkpoint.tensors, checkpoint.config),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def test_the_environment_is_left_as_it_was(model, monkeypatch):
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
        else:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", before)
        with model.layer(0):
            pass
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before
